"""Packaging of bridge_jax. Ranges are pinned to what the test suite runs on; see README, "Install"."""

from pathlib import Path

from setuptools import find_packages, setup

JAX = "jax>=0.10,<0.13"
SERVE = ["starlette>=0.47,<2", "uvicorn>=0.34,<1", "prometheus-client>=0.21,<1"]
BM25 = ["bm25s>=0.2.14,<1"]
PREPARE = ["markdown-it-py>=3,<5", "beautifulsoup4>=4.12,<5", "pypdf>=5,<8"]

setup(
    name="bridge-jax",
    version="0.1.0",
    description="BRIDGE: bilevel retrieval-credit-aware agentic reinforcement learning, in JAX for TPU and GPU",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    url="https://github.com/bridge-jax/bridge_jax",  # a fork's own: the notebooks' badges and install cells have it from here
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["bridge_jax", "bridge_jax.*"]),
    package_data={
        "bridge_jax.data": ["embedded/*"],
        "bridge_jax.models": ["shipped/README.md", "shipped/*/*"],
        "bridge_jax.report": ["assets/*"],
        "bridge_jax.retrieval": ["openapi.json"],
    },
    install_requires=[
        JAX,
        "flax>=0.12,<0.13",
        "optax>=0.2.5,<0.3",
        "orbax-checkpoint>=0.11.20,<0.13",
        "etils[epath]>=1.12,<2",
        "transformers>=4.57,<6",
        "sentencepiece>=0.2,<0.3",
        'scann>=1.4,<2; sys_platform == "linux" and platform_machine == "x86_64"',
        "tensorflow-datasets>=4.9.9,<5",
        "array_record>=0.7,<1; sys_platform == 'linux' or sys_platform == 'darwin'",
        "ml-collections>=1.0,<2",
        "numpy>=2.0,<3",
        "jinja2>=3.1,<4",
        "safetensors>=0.5,<1",
        "gguf>=0.17,<1",
        "pyarrow>=18",
        "rich>=13,<16",
        "requests>=2.32,<3",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10,<0.13"],
        "cuda13": ["jax[cuda13]>=0.10,<0.13"],
        "gcs": ["gcsfs>=2025.2"],
        "wandb": ["wandb>=0.19,<1"],
        "tensorboard": ["tensorboardX>=2.6,<3"],
        "serve": SERVE,
        "bm25": BM25,
        "prepare": PREPARE,
        "bench": ["matplotlib>=3.9,<4"],
        "notebooks": ["matplotlib>=3.9,<4", "ipykernel>=6.29,<8"],
        "peers": ["google-tunix==0.1.7", "trl==1.16.0", "torch==2.13.0"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.11,<1",
            "torch==2.13.0",
            "peft>=0.17,<1",
            "faiss-cpu>=1.9,<2",
            "selenium>=4.20,<5",
            *SERVE,
            *BM25,
            *PREPARE,
            "nbclient>=0.10,<1",
            "ipykernel>=6.29,<8",
            "matplotlib>=3.9,<4",
            "mypy>=1.15,<3",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
