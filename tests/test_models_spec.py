"""The numbers of a model: parameters and FLOPs against hand counts and published figures."""

import subprocess
import sys

import pytest

from colabtpu.errors import InvalidArgumentError
from colabtpu.models.spec import Spec, flops_per_token, named_spec


def test_gpt2_small_has_the_published_size():
    spec = named_spec("gpt2-small")
    # 124,439,808 in the published checkpoint (50,257 rows), of which the dense layers' biases are
    # 12 * (4 * 768 + 3072 + 768) = 82,944; padding to 50,304 adds 47 rows of 768.
    assert spec.parameters == 124_439_808 - 82_944 + 47 * 768
    assert (spec.padded_vocab_size, spec.head_dim) == (50304, 64)


def test_160m_has_the_published_size():
    spec = named_spec("160m")
    assert round(spec.parameters / 1e6, 1) == 163.6
    assert round(spec.non_embedding_parameters / 1e6) == 130
    assert spec.head_dim == 256


def test_flops_per_token_is_palm_appendix_b():
    spec = Spec(vocab_size=128, seq_len=10, layers=2, dim=8, heads=2, positions="learned")
    weights = 128 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 32 + 2 * 8) + 8  # the position table adds none
    assert flops_per_token(spec) == 6 * weights + 12 * 2 * 2 * 4 * 10
    assert flops_per_token(spec, seq_len=20) == 6 * weights + 12 * 2 * 2 * 4 * 20


def test_an_untied_table_adds_parameters_but_no_flops():
    tied = Spec(1024, 64)
    untied = Spec(1024, 64, tied=False)
    assert untied.parameters - tied.parameters == 1024 * 512
    assert flops_per_token(untied) == flops_per_token(tied)


@pytest.mark.parametrize(
    ("changes", "padded"), [({}, 50304), ({"vocab_multiple": 256}, 50432), ({"vocab_size": 1}, 128)]
)
def test_the_vocabulary_is_padded(changes, padded):
    assert named_spec("gpt2-small", **changes).padded_vocab_size == padded


@pytest.mark.parametrize(("dim", "heads"), [(512, 4), (768, 6), (256, 4), (1024, 8), (64, 4)])
def test_default_heads_suit_the_matrix_unit(dim, heads):
    assert Spec(100, 8, dim=dim).heads == heads


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"seq_len": 2.5}, "seq_len=2.5"),
        ({"layers": True}, "layers=True"),
        ({"heads": 7}, "heads=7"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3"),
        ({"positions": "alibi"}, "alibi"),
        ({"norm": "batch"}, "batch"),
        ({"dim": 12, "heads": 4}, "head_dim=3"),
    ],
)
def test_a_bad_number_names_itself(arguments, word):
    with pytest.raises(InvalidArgumentError, match=word):
        Spec(**{"vocab_size": 100, "seq_len": 8, **arguments})


def test_unknown_names_list_what_exists():
    with pytest.raises(InvalidArgumentError, match="gpt2-small"):
        named_spec("gpt5")
    with pytest.raises(InvalidArgumentError, match="depth"):
        named_spec("tiny", depth=3)


def test_the_room_imports_no_framework():
    code = (
        "import sys; from colabtpu.models import named_spec; import colabtpu as ct; ct.models;"
        "sys.exit(any(name in sys.modules for name in ('keras', 'jax', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
