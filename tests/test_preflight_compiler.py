"""The compiler's process: crash, hang and refusal are results, and results are kept."""

import os
import sys
import textwrap

import pytest

import colabtpu
from colabtpu import chips
from colabtpu.errors import InvalidArgumentError
from colabtpu.preflight import cache, compiler
from colabtpu.preflight.program import Argument, Program

MODULE = """\
module @step {
  func.func public @main(%w: tensor<256x256xf32> {tf.aliasing_output = 0 : i32},
                         %x: tensor<256x256xf32>) -> tensor<256x256xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    return %0 : tensor<256x256xf32>
  }
}
"""
needs_libtpu = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]
V5E = chips.target("v5e-1")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path))
    monkeypatch.delenv("COLABTPU_LIBTPU", raising=False)


def program(module=MODULE):
    arguments = (
        Argument("w", "weights", (256, 256), "float32"),
        Argument("x", "batch", (256, 256), "float32"),
    )
    return Program(module.encode(), "jax", "train", arguments, 256, 1, 1, None, identity=module)


class TestWithLibtpu:
    pytestmark = needs_libtpu

    def test_figures_are_those_of_the_program(self):
        result = compiler.compile_program(program(), V5E)
        assert result.status == compiler.COMPILED, result.message
        assert result.argument_sizes == (256 * 256 * 4, 256 * 256 * 4)
        assert result.alias_bytes == 256 * 256 * 4
        assert result.flops == pytest.approx(2 * 256**3, rel=0.02)
        again = compiler.compile_program(program(), V5E)
        assert again.cached
        assert again.argument_sizes == result.argument_sizes
        # Another chip is another question.
        assert cache.read(compiler._key(program(), chips.target("v6e-1"), "x")) is None

    def test_a_module_that_is_none_is_refused_not_fatal(self):
        result = compiler.compile_program(program("module { nonsense }"), V5E)
        assert result.status == compiler.REFUSED
        assert result.message

    def test_a_slice_of_many_chips_is_described(self):
        result = compiler.compile_program(program(), chips.target("v5e:4x4"), memory_only=True)
        assert result.status in (compiler.SCHEDULED, compiler.COMPILED)

    def test_time_is_limited(self):
        result = compiler.compile_program(program(), V5E, time_limit_seconds=0.2)
        assert result.status == compiler.TIMED_OUT
        assert "stopped after 0 s" in result.message
        assert not result.conclusive
        # What is inconclusive is not kept.
        assert cache.read(compiler._key(program(), V5E, compiler.libtpu_version())) is None


def worker_that(behaves, tmp_path, monkeypatch):
    """Puts a stand-in for the whole interpreter in the place of the one that runs libtpu."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n" + textwrap.dedent(behaves))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(compiler, "unavailable", lambda libtpu=None: "")


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_crash_is_a_result_and_the_caller_lives(tmp_path, monkeypatch):
    worker_that("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", tmp_path, monkeypatch)
    result = compiler.compile_program(program(), V5E)
    assert result.status == compiler.CRASHED
    assert "-11" in result.message
    assert result.temp_bytes is None


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_hang_ends_with_the_time_limit_and_leaves_no_process(tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    worker_that(
        f"""
        import os, time
        open({str(pid_file)!r}, "w").write(str(os.getpid()))
        time.sleep(600)
        """,
        tmp_path,
        monkeypatch,
    )
    result = compiler.compile_program(program(), V5E, time_limit_seconds=2.0)
    assert result.status == compiler.TIMED_OUT
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_worker_sees_nothing_of_this_runtime_s_tpu(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    env = compiler._environment(None, None)
    assert "TPU_ACCELERATOR_TYPE" not in env
    assert "PJRT_DEVICE" not in env
    assert "XLA_FLAGS" not in env
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["TPU_SKIP_MDS_QUERY"] == "1"


def test_other_machines_are_told_why(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "x86-64 Linux only" in compiler.unavailable()


def test_another_libtpu_is_found_by_its_folder(tmp_path):
    folder = tmp_path / "libtpu"
    folder.mkdir()
    (folder / "libtpu.so").write_bytes(b"")
    (tmp_path / "libtpu-0.0.99.dist-info").mkdir()
    assert compiler.libtpu_version(str(tmp_path)) == "0.0.99"
    assert compiler.libtpu_version(str(folder / "libtpu.so")) == "0.0.99"
    assert compiler._environment(str(tmp_path), None)["TPU_LIBRARY_PATH"].endswith("libtpu.so")
    with pytest.raises(InvalidArgumentError, match="libtpu"):
        compiler.libtpu_version(str(tmp_path / "nowhere"))


def test_the_fingerprint_ignores_where_a_line_stands_and_nothing_else():
    assert program().fingerprint == program().fingerprint
    assert program().fingerprint != program(MODULE.replace("256x256", "128x128")).fingerprint


def test_a_damaged_cache_counts_as_none():
    cache.write("key", {"a": 1})
    assert cache.read("key") == {"a": 1}
    (cache.folder() / "key.json").write_text("{")
    assert cache.read("key") is None


def test_importing_preflight_imports_no_framework():
    code = (
        "import sys, colabtpu as ct; ct.preflight.explain('x'); ct.preflight.tokens(1, 2);"
        "print(sorted({'jax', 'keras', 'tensorflow'} & set(sys.modules)))"
    )
    import subprocess

    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=os.path.dirname(os.path.dirname(colabtpu.__file__)),
    )
    assert out.stdout.strip() == "[]"
