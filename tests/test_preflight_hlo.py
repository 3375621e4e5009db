"""What preflight reads out of a compiled program, against programs counted by hand."""

from colabtpu.preflight import hlo

# Two products in a row, then their gradient-like reuse: h1 lives until `out`, h2 dies at `sum`.
SCHEDULED = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias) }, entry_computation_layout={}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x, %y)
}

ENTRY %main (w: f32[256,256], x: f32[1000,256]) -> (f32[], f32[256,256]) {
  %w = f32[256,256]{1,0:T(8,128)} parameter(0)
  %x = f32[1000,256]{1,0:T(8,128)} parameter(1)
  %h1 = bf16[1000,256]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%f1, metadata={op_name="jit(train_step)/jvp(net/layer_0)/dot_general"}
  %h2 = f32[1000,256]{1,0:T(8,128)} fusion(%h1, %w), kind=kOutput, calls=%f2, metadata={op_name="jit(train_step)/transpose(jvp(net/layer_1))/mul"}
  %fast = f32[1000,256]{1,0:T(8,128)S(1)} copy(%h2)
  %loss = f32[]{:T(128)} reduce(%h2), to_apply=%add
  %all = f32[]{:T(128)} all-reduce(%loss), replica_groups=[1,8]<=[8], to_apply=%add
  %new = f32[256,256]{1,0:T(8,128)} fusion(%h1, %fast), kind=kOutput, calls=%f3
  ROOT %out = (f32[]{:T(128)}, f32[256,256]{1,0:T(8,128)}) tuple(%all, %new)
}
"""  # noqa: E501

LOOP = """\
HloModule jit_scan, is_scheduled=true

%body (state: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %state = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %row = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %i = s32[] get-tuple-element(%state), index=0
  %gathered = f32[64,128]{1,0:T(8,128)} all-gather(%row), dimensions={0}
  %small = f32[8,128]{1,0:T(8,128)} fusion(%gathered), kind=kLoop, calls=%f
  ROOT %next = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i, %small)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%zero, %x)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_padded_bytes_fill_the_tiles():
    # (8, 128) tiles: 1000 rows stay 1000, 100 columns become 128.
    assert hlo.padded_bytes("f32[1000,100]{1,0:T(8,128)}") == 1000 * 128 * 4
    # The layout says which dimension is the minor one: here the first.
    assert hlo.padded_bytes("f32[100,1000]{0,1:T(8,128)}") == 128 * 1000 * 4
    # bfloat16 packs two rows into one sublane, which pads 3 rows to 8 all the same.
    assert hlo.padded_bytes("bf16[3,128]{1,0:T(8,128)(2,1)}") == 8 * 128 * 2
    assert hlo.padded_bytes("f32[]") == 4
    assert hlo.padded_bytes("pred[8,128]{1,0:T(8,128)(4,1)}") == 1024


def test_on_chip_memory_costs_no_hbm():
    assert hlo.padded_bytes("f32[8,128]{1,0:T(8,128)S(1)}") == 0
    assert hlo.padded_bytes("f32[8,128]{1,0:T(8,128)S(1)}", hbm_only=False) == 4096


def test_arguments_are_counted_in_order():
    assert hlo.argument_bytes(SCHEDULED) == [256 * 256 * 4, 1000 * 256 * 4]


def test_peak_counts_what_lives_together_and_names_the_layer():
    # h1 and h2 live together (512,000 + 1,024,000 bytes) with the scalar loss; `fast` is on chip,
    # and `new` takes the place of the donated argument.
    total, buffers = hlo.peak(SCHEDULED)
    assert 1000 * 256 * (2 + 4) <= total <= 1000 * 256 * (2 + 4) + 16
    assert [b.size_bytes for b in buffers[:2]] == [1_024_000, 512_000]
    assert buffers[0].op.endswith("transpose(jvp(net/layer_1))/mul")


def test_a_loop_adds_the_fullest_moment_of_its_body():
    total, buffers = hlo.peak(LOOP)
    assert total >= 64 * 128 * 4
    assert buffers[0].shape == "f32[64,128]"


def test_collectives_are_summed_by_kind_and_by_turns_of_a_loop():
    (reduced,) = hlo.collectives(SCHEDULED)
    assert (reduced.kind, reduced.count, reduced.size_bytes) == ("all-reduce", 1, 4)
    (gathered,) = hlo.collectives(LOOP)
    assert (gathered.kind, gathered.count) == ("all-gather", 12)
    assert gathered.size_bytes == 12 * 64 * 128 * 4


def test_started_collectives_count_their_result_once():
    text = SCHEDULED.replace(
        "%all = f32[]{:T(128)} all-reduce(%loss)",
        "%all = (f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) all-gather-start(%loss)",
    )
    (gathered,) = hlo.collectives(text)
    assert (gathered.kind, gathered.size_bytes) == ("all-gather", 64 * 128 * 4)


def test_a_buffer_that_is_only_moved_is_named_after_what_it_holds():
    text = SCHEDULED.replace(
        "%fast = f32[1000,256]{1,0:T(8,128)S(1)} copy(%h2)",
        "%moved = (f32[1000,256]{1,0:T(8,128)}, f32[1000,256]{1,0:T(8,128)}, u32[]) "
        "copy-start(%h2)\n  %fast = f32[1000,256]{1,0:T(8,128)} copy-done(%moved)",
    )
    moved = next(b for b in hlo.peak(text)[1] if b.kind == "copy-start")
    assert moved.shape == "f32[1000,256]"
    assert moved.size_bytes == 1000 * 256 * 4
    assert moved.op.endswith("transpose(jvp(net/layer_1))/mul")
