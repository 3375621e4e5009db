"""TPU errors in plain words: the texts are libtpu's and those that users reported."""

import pytest

from colabtpu.preflight.messages import explain, layer_of, size

# libtpu 0.0.21.1, compiling four wide layers for a v5e.
COMPILE_TIME = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.36G of 15.75G hbm. Exceeded hbm capacity by 5.61G.

Total hbm usage >= 21.61G:
    reserved        258.00M
    program          21.36G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 21.36G:
    HLO temp         21.36G (100.0% utilization: Unpadded (21.36G) Padded (21.36G), 0.0% fragmentation (108.5K))

  Largest program allocations in hbm:

  1. Size: 6.10G
     Operator: op_name="jit(step)/jvp(layer_1)/dot_general" source_file="step.py" source_line=8
     Shape: f32[400000,4096]{1,0:T(8,128)}
     Unpadded size: 6.10G
     XLA label: convolution_tanh_fusion.2 = fusion(convolution_tanh_fusion.3, copy-done), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 3.05G
     Operator: op_name="jit(step)/transpose(jvp(layer_3))/dot_general" source_file="step.py"
     Shape: bf16[400000,4096]{1,0:T(8,128)(2,1)}
     XLA label: multiply_add_fusion.2 = fusion(convolution_tanh_fusion.1)
     Allocation type: HLO temp
     ==========================

  3. Size: 512B
     Shape: (f32[4096,4096]{1,0:T(8,128)S(1)}, u32[]{:S(2)})
     Allocation type: HLO temp
     ==========================
"""  # noqa: E501
NEWER = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (29.57G) exceeds available HBM (15.75G). HLO module: jit_step."
)
GIB = 2**30


def test_the_compiler_s_out_of_memory_is_read_in_full():
    said = explain(COMPILE_TIME)
    assert said.kind == "out of memory"
    assert said.needed_bytes == int(21.36 * GIB)
    assert said.available_bytes == int(15.75 * GIB)
    assert "5.61 GiB too much" in said.summary
    assert [round(b.size_bytes / GIB, 2) for b in said.buffers] == [6.10, 3.05]
    assert said.buffers[0].shape == "f32[400000,4096]"
    assert "layer_3 (backward)" in str(said)


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        (NEWER, 29.57, 15.75),
        ("Ran out of memory in memory space hbm. Used 8.38G of 8.00G hbm", 8.38, 8.0),
        ("Ran out of memory in memory space hbm. Used 9.08G of 7.48G hbm", 9.08, 7.48),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=31457280000) would exceed memory "
            "(size=17179869184) :...', space=hbm",
            31457280000 / 2**30,
            16.0,
        ),
        ("Used 900.00M of 512.00M hbm. Exceeded", 900 / 1024, 0.5),
    ],
)
def test_figures_of_every_known_wording(text, needed, available):
    said = explain(RuntimeError(text))
    assert said.needed_bytes == pytest.approx(needed * GIB, abs=1)
    assert said.available_bytes == pytest.approx(available * GIB, abs=1)


def test_an_allocation_that_fails_while_training_is_out_of_memory():
    said = explain(
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50G. "
        "That was not possible. There are 1.20G free.; (0x0x0_HBM0)"
    )
    assert said.kind == "out of memory"
    assert said.needed_bytes == int(1.5 * GIB)
    assert said.available_bytes == int(1.2 * GIB)
    assert "asks for another 1.50 GiB" in said.summary


def test_host_memory_is_told_apart_from_hbm():
    assert "the host's RAM does not count" in explain(NEWER).summary


def test_an_op_that_the_tpu_lacks_is_named():
    said = explain(
        NotImplementedError("MLIR translation rule for primitive 'eig' not found for platform tpu")
    )
    assert (said.kind, said.op) == ("unsupported op", "eig")
    said = explain("No OpKernel was registered to support Op 'ConfigureDistributedTPU'")
    assert said.op == "ConfigureDistributedTPU"


def test_a_held_chip_is_told_apart():
    said = explain("ABORTED: Internal error when accessing libtpu multi-process lockfile.")
    assert said.kind == "busy"


def test_an_unknown_error_is_not_explained_away():
    said = explain(ValueError("something else"))
    assert said.kind == "unknown"
    assert "something else" in said.summary


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(train_step)/jvp(gpt2/layer_0)/dot_general", "gpt2/layer_0"),
        ("jit(train_step)/transpose(jvp(gpt2/layer_0))/mul", "gpt2/layer_0 (backward)"),
        ("jit(train_step)/jvp(layer_0)/self_attention/vmap()/sub", "layer_0/self_attention"),
        ("jit(train_step)/add", "add"),
        ("", ""),
    ],
)
def test_layers_are_read_out_of_operation_names(op_name, layer):
    assert layer_of(op_name) == layer


def test_sizes_are_written_for_people():
    assert size(16911433728) == "15.75 GiB"
    assert size(512) == "512 B"
