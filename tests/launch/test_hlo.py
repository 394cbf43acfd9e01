"""Costs read from HLO: against closed forms, XLA's own figures, and texts of the TPU compiler."""

import hlo
import jax
import jax.numpy as jnp
import pytest


def compiled(fn, *shapes, **options):
    return jax.jit(fn, **options).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def cost(fn, *shapes, **options):
    return hlo.Module(compiled(fn, *shapes, **options).as_text()).cost()


def test_a_loop_counts_as_often_as_it_runs():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), None), x, w)[0]

    found = cost(layers, (64, 128), (5, 128, 128))
    assert found.flops == 5 * 3 * 2 * 64 * 128 * 128 and found.open_loops == 0


def test_a_loop_that_data_end_counts_once():
    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ w, x)

    module = hlo.Module(compiled(until, (64, 128), (128, 128)).as_text())
    assert module.cost().flops == 2 * 64 * 128 * 128 == module.open_cost().flops
    assert module.cost().open_loops == 1


def test_the_costlier_branch_counts():
    def either(flag, x):
        return jax.lax.cond(flag.sum() > 0, lambda: x @ x @ x, lambda: x)

    assert cost(either, (1,), (96, 96)).flops == 2 * 2 * 96**3


@pytest.mark.parametrize(
    ("padding", "strides", "stretch", "dilation"),
    [((0, 0), 1, 1, 1), ((3, 3), 1, 1, 1), ((2, 1), 2, 1, 1), ((1, 2), 1, 3, 1), ((4, 0), 1, 1, 2), ((5, 5), 2, 2, 3)],
)
def test_convolutions_count_real_positions_as_xla_does(padding, strides, stretch, dilation):
    def convolve(x, w):
        options = {"lhs_dilation": (stretch,), "rhs_dilation": (dilation,), "dimension_numbers": ("NWC", "WIO", "NWC")}
        return jax.lax.conv_general_dilated(x, w, (strides,), [padding], **options)

    program = compiled(convolve, (2, 9, 3), (4, 3, 5))
    # Fusions around it cost XLA a little more.
    assert hlo.Module(program.as_text()).cost().flops == pytest.approx(program.cost_analysis()["flops"], rel=0.02)


def test_an_update_in_place_touches_what_it_writes():
    def write(cache, new):
        return jax.lax.dynamic_update_slice(cache, new, (0, 3, 0))

    found = cost(write, (8, 4096, 64), (8, 1, 64), donate_argnums=0)
    assert found.bytes <= 4 * 8 * 64 * 4


def test_a_slice_of_stacked_weights_reads_one_layer():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (x * w, None), x, w)[0]

    found = cost(layers, (1024,), (50, 1024))
    assert found.bytes < 50 * 6 * 1024 * 4 + 4 * 1024 * 4  # all of w in every turn would be 50 times as much


TPU = """
HloModule jit_f, is_scheduled=true

%body (p: (bf16[1,8,16], u32[])) -> (bf16[1,8,16], u32[]) {
  %p = (bf16[1,8,16]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %two = u32[]{:T(128)} constant(2)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %x = bf16[1,8,16]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=0
  %kernel = (f32[8,16]{1,0}) custom-call(%x), custom_call_target="tpu_other", backend_config={"text": "a {
}} b"}
  %start = (bf16[1,8,16]{2,1,0}, bf16[1,8,16]{2,1,0}, u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %done = bf16[1,8,16]{2,1,0:T(8,128)(2,1)S(1)} collective-permute-done(%start)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %t = (bf16[1,8,16]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%done, %next)
}

%condition (q: (bf16[1,8,16], u32[])) -> pred[] {
  %q = (bf16[1,8,16]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%q), index=1
  %limit = u32[]{:T(128)} constant(8)
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

%gather.1 (a: bf16[4,16]) -> bf16[16,16] {
  %a = bf16[4,16]{1,0} parameter(0)
  ROOT %ag = bf16[16,16]{1,0} all-gather(%a), channel_id=7, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
}

%gather.2 (b: bf16[4,16]) -> bf16[16,16] {
  %b = bf16[4,16]{1,0} parameter(0)
  ROOT %again = bf16[16,16]{1,0} all-gather(%b), channel_id=7, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
}

ENTRY %main (w: bf16[4,16], x: bf16[1,8,16], u: u32[]) -> f32[8] {
  %w = bf16[4,16]{1,0} parameter(0)
  %x.1 = bf16[1,8,16]{2,1,0} parameter(1)
  %u = u32[] parameter(2)
  %tuple = (bf16[1,8,16]{2,1,0}, u32[]) tuple(%x.1, %u)
  %loop = (bf16[1,8,16]{2,1,0}, /*index=1*/u32[]) while(%tuple), condition=%condition, body=%body
  %first = bf16[16,16]{1,0} fusion(%w), kind=kCustom, calls=%gather.1
  %second = bf16[16,16]{1,0} fusion(%w), kind=kCustom, calls=%gather.2
  %y = f32[8]{0} all-reduce(%u), channel_id=3, replica_groups=[2,8]<=[16], to_apply=%add
  ROOT %conv = f32[8,32,1]{1,0,2} convolution(%x.1, %first), window={size=1}, dim_labels=0bf_io0->bf0
}
"""


def test_texts_of_the_tpu_compiler():
    module = hlo.Module(TPU)
    found = module.cost()
    assert module.trips(module.computations["main"]["loop"]) == 4  # 0, 2, 4, 6: the body was unrolled
    assert found.count == {"collective-permute": 4, "all-gather": 1, "all-reduce": 1}  # one gather behind two fusions
    assert found.wire["collective-permute"] == 4 * 8 * 16 * 2
    assert found.wire["all-gather"] == 3 * 4 * 16 * 2  # what the three others of the four have
    assert found.wire["all-reduce"] == 2 * 4 * 7 / 8
    assert found.waited == found.wire["all-reduce"]  # the others run in the background
