"""The report for a bug report: what helps is in it, secrets are not."""

import dataclasses
import json

import runtimes

from colabtpu import bundle, cli, doctor
from colabtpu.doctor import diagnose


def test_the_report_holds_findings_builds_and_machine_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    environment = runtimes.colab_tpu(tmp_path)
    variables = runtimes.detect(
        {
            "TPU_ACCELERATOR_TYPE": "v5e-1",
            "TPU_API_KEY": "k1-very-secret",
            "KAGGLE_USER_SECRETS_TOKEN": "k2-very-secret",
            "HF_TOKEN": "k3-very-secret",
            "XLA_FLAGS": "--dump_to=/home/ada/dump",
            "TPU_NAME": "grpc://ada:k4-very-secret@10.0.0.2:8470",
            "JAX_COORDINATOR_ADDRESS": "hf_k5verysecret",
        },
        tmp_path,
    ).variables
    diagnosis = diagnose(dataclasses.replace(environment, variables=variables))
    text = bundle.write(diagnosis, tmp_path / "report.md").read_text()
    assert "secret" not in text.replace("without secrets", "")
    assert "/ada" not in text
    assert "ada:" not in text
    assert '"TPU_API_KEY": "***"' in text
    assert "--dump_to=~/dump" in text
    assert "grpc://***@10.0.0.2:8470" in text
    assert '"libtpu": "0.0.21.1"' in text
    for finding in diagnosis.findings:
        assert finding.code in text
    assert "rich==" in text, "every installed distribution is listed"


def test_the_command_writes_it_and_still_prints_json(tmp_path, monkeypatch, capsys):
    environment = runtimes.colab_tpu(tmp_path)
    monkeypatch.setattr(doctor.surroundings, "detect", lambda: environment)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--json", "--bundle"]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] is True
    assert (tmp_path / "colabtpu-report.md").stat().st_size < 100_000
    assert cli.main(["doctor", "--bundle", "mine.md"]) == 0
    assert (tmp_path / "mine.md").exists()
