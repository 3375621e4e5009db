"""The table of TPU generations and the names of slices.

Expected layouts are what libtpu 0.0.52 itself listed for each topology name
(`jax.experimental.topologies.get_topology_desc`): devices and hosts, counted there.
"""

import pytest

from colabtpu import chips
from colabtpu.errors import ColabTPUError, InvalidArgumentError

# target name -> topology, host bounds, devices libtpu lists, hosts
LISTED_BY_LIBTPU = {
    "v2-8": ("v2:2x2", (2, 2, 1), 8, 1),
    "v2-128": ("v2:8x8", (2, 2, 1), 128, 16),
    "v3-8": ("v3:2x2", (2, 2, 1), 8, 1),
    "v3-2048": ("v3:32x32", (2, 2, 1), 2048, 256),
    "v4-8": ("v4:2x2x1", (2, 2, 1), 8, 1),
    "v4-32": ("v4:2x2x4", (2, 2, 1), 32, 4),
    "v5e-1": ("v5e:1x1", (1, 1, 1), 1, 1),
    "v5e-4": ("v5e:2x2", (2, 2, 1), 4, 1),
    "v5e-8": ("v5e:2x4", (2, 4, 1), 8, 1),
    "v5litepod-8": ("v5e:2x4", (2, 4, 1), 8, 1),
    "v5e-64": ("v5e:8x8", (2, 2, 1), 64, 16),
    "v5e-256": ("v5e:16x16", (2, 2, 1), 256, 64),
    "v5e:16x16": ("v5e:16x16", (2, 2, 1), 256, 64),
    "V5E:2x4": ("v5e:2x4", (2, 4, 1), 8, 1),
    "v5p-8": ("v5p:2x2x1", (2, 2, 1), 4, 1),
    "v5p-16": ("v5p:2x2x2", (2, 2, 1), 8, 2),
    "v6e-1": ("v6e:1x1", (1, 1, 1), 1, 1),
    "v6e-4": ("v6e:2x2", (2, 2, 1), 4, 1),
    "v6e-8": ("v6e:2x4", (2, 4, 1), 8, 1),
    "tpu7x-8": ("tpu7x:2x2x1", (2, 2, 1), 8, 1),
    "tpu7x-128": ("tpu7x:4x4x4", (2, 2, 1), 128, 16),
}


@pytest.mark.parametrize("name", LISTED_BY_LIBTPU)
def test_target_is_the_slice_that_libtpu_lists(name):
    target = chips.target(name)
    assert (
        target.topology,
        target.chips_per_host_bounds,
        target.num_compiler_devices,
        target.num_hosts,
    ) == LISTED_BY_LIBTPU[name]


def test_v4_shows_a_program_one_device_a_chip_where_the_compiler_shows_two():
    target = chips.target("v4-8")
    assert (target.num_chips, target.num_devices, target.num_compiler_devices) == (4, 4, 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-3", "v5e-1, v5e-4, v5e-8"),
        ("v3-4", "TensorCores, 2 a chip"),
        ("v2-16", "v2-8, v2-32"),
        ("v5e:3x3", "even sides"),
        ("v5e:0x4", "even sides"),
        ("v5e:2x2x2", "flat"),
        ("v9-8", "'v9-8'"),
        ("v5e", "'v5e-8'"),
        ("", "''"),
        ("v5e-0", "no slice of size 0"),
    ],
)
def test_a_wrong_target_gets_one_error_that_names_the_next_step(name, said):
    with pytest.raises(InvalidArgumentError) as caught:
        chips.target(name)
    assert said in str(caught.value)
    assert isinstance(caught.value, ColabTPUError)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v2", "v2"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
    ],
)
def test_the_device_kinds_of_jax_are_recognised(kind, name):
    # The kinds are what jax 0.7.2 printed for each generation's topology.
    assert chips.of_device_kind(kind) is chips.chip(name)


def test_an_unknown_device_kind_is_not_guessed():
    assert chips.of_device_kind("TPU v9") is None
    assert chips.of_device_kind("NVIDIA H200") is None


def test_a_wrong_generation_is_refused():
    with pytest.raises(InvalidArgumentError, match="v5litepod"):
        chips.chip("v5litepod-8")


def test_figures_per_device_of_a_colab_chip_and_of_a_kaggle_v3():
    v5e, v3 = chips.chip("v5e"), chips.chip("V3")
    assert v5e.peak_bf16_flops_per_device == 197e12
    assert v3.peak_bf16_flops_per_device == 61.5e12
    assert v3.hbm_bytes_per_second_per_device == 450e9
    # The ridge point that the roofline model of v5e gives: about 240 FLOP a byte.
    assert round(v5e.peak_bf16_flops / v5e.hbm_bytes_per_second) == 241


def test_no_two_generations_share_a_pci_id_and_memory_is_consistent():
    ids = [pci for c in chips.CHIPS.values() for pci in c.pci_ids]
    assert len(ids) == len(set(ids)) == 7
    for c in chips.CHIPS.values():
        assert 0.9 * c.hbm_bytes < c.hbm_usable_bytes <= c.hbm_bytes, c.name
        assert c.source
