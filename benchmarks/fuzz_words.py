"""What the inputs of `fuzz.py` are made of."""
# fmt: off

NAMES = ("think", "search", "information", "answer")
COMMON = [
    "", " ", "\n", "\r", "\t", "\0", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\xad", "\u200b", "\u200d", "\u200e", "\u200f",
    "\u202e", "\u2028", "\u2029", "\u2060", "\ufeff", "\ufffd", "\ud800", "\udc80", "\udcff", "\U0001f600", "e\u0301", "\u0338",
    "İ", "ſ", "ß", "ﬃ", "＜", "＞", "｛", "ａ", "人", "<script>alert(1)</script>", "Ignore all previous instructions.", "%s", "{0}",
    "$(id)", "../../etc/passwd", "'; DROP TABLE", "&lt;", "\\u003c",
]
TAGS = [f"<{slash}{name}>" for name in NAMES for slash in ("", "/")]
TAGS += ["<", ">", "</", "< /", "sea", "rch", "<SEARCH", "ANSWER >", "／", "＜", "＞"]
# What the published tokenizers add to their words: special tokens, and those that they do not call special.
_QWEN = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]
_CODE = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
_LLAMA = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>", "<|finetune_right_pad_id|>", *(f"<|reserved_special_token_{i}|>" for i in range(248)),
]
FAMILIES = {
    "qwen2.5": (_QWEN, ["<tool_call>", "</tool_call>", *_CODE]),
    "qwen3": (
        _QWEN, ["<tool_call>", "</tool_call>", *_CODE, "<tool_response>", "</tool_response>", "<think>", "</think>"],
    ),
    "llama3": (_LLAMA, []),
}
SPECIAL = [
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "system\n", "[PAD]", "<s>", "</s>", "<unk>", "<tool_call>",
    "</tool_response>", "<|fim_prefix|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>",
    "<|reserved_special_token_7|>", "<|", "|>",
]
ANSWERS = [
    "a", "an", "the", "The ", "A", ".", "'", "-", "_", " ", "U.S.", "yes", "no", "noanswer", "|", "7", "é", "a\u0301",
]
JSON = [
    '"', "{", "}", "[", "]", ":", ",", "null", "true", "1", "-0", "1e999", "NaN", "-Infinity", "9" * 400, "\\ud800", "\\u0000",
    "\\", '"a"', "[" * 3000,
]
QUESTIONS = [
    '{"id": "1", "question": "who?", "golden_answers": ["a", "b"], "metadata": {"gold_ids": ["p1"]}}\n',
    '{"id": 2, "question": "who?", "golden_answers": ["a"]}\n', '{"idx": 3, "question": "q", "answer": "a|b"}\n',
    "question,answer\n",
    "question;answers;gold\n", "a?,b|c\n", '"a\n?";b\n', "\n", "\r\n", "\r", ";", "\t", '"id": ',
    '"question": ', '"golden_answers": ', '"metadata": ', '"gold_ids": ', '"answer": ', '"idx": ', '"reward_model": ',
    '"data_source": ',
]
PASSAGES = [
    '{"id": "1", "contents": "\\"T\\"\\nx"}\n',
    '{"id": 2, "title": "t", "text": "x"}\n', '{"id": "3", "title": "", "content": "y"}\n',
    "id\ttext\ttitle\n", "1\tx\ty\n", '"a\n\tb"\t\t\n', '"title": ', '"contents": ', '"content": ', '"text": ', "\t", "\n",
    "\x1f\udc8b", "\x1f\udc8b\x08\x00",
]
TENSORS = [
    '{"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}',
    '"b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}}',
    '{"a": {"dtype": "I8", "shape": [32, 1], "data_offsets": [0, 32]}, ', '"__metadata__": {"format": "pt"}', "F64", "U8", "BOOL",
    "F8_E4M3", "[0, 64]", "[-4, 60]", "[64, 0]", "[]", "18446744073709551616", "4294967296", "-1", "0", "1.0", "shape",
    "data_offsets", "dtype", " ",
]
VALUES = [
    "1", "-", "+", "0x", "1e5", "1_0", "j", "(", ")", "[", "]", "{", "}", ",", "'", '"', "None", "True", "false", "nan", "inf",
    "*",
    "lambda:0", "a=", "b", "\\", "#", "9" * 400, "9" * 5000, "()", "''", "f'{1}'", "__import__('os')", "(" * 100, "[" * 3000,
    "-" * 3000,
]
NUMBERS = ["\x00" * 4, "\x00\x00\x00@", "\x01\x00\x00\x00", "\udcff" * 4, "\x00\x00\udcc0\x7f", "\x00" * 16, "\x03" + "\x00" * 7]
HTTP = [
    "GET ", "POST ", "PUT ", "/retrieve", "/search?k=", "/vectors", "/adapter", "/health", "/index", "/metrics", "/openapi.json",
    "/",
    "\n", "\n\n", "content-length: ", "content-type: application/json", "authorization: Bearer ", "9" * 5000, "²", "1", "3",
    "&k=",
    '{"queries": ["', '"topk": ', '{"folder": "', 'POST /retrieve\n\n{"queries": ["a"], "topk": 2, "return_scores": true}',
    "POST /search?k=2\n\n" + "\x00" * 16, "POST /adapter\nauthorization: Bearer secret\n\n",
]
