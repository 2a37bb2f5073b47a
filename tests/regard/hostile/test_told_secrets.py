"""What the command line says of an error holds no token, no password and no signature."""

import logging

import pytest

from regard.commands.app import _Console, without_secrets

SECRET = "hf_recognisableTokenOfSomeone"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--data", f"https://me:{SECRET}@example.org/rows.csv"),
        ("--data", f"https://{SECRET}@example.org/rows.csv"),
        ("--data", f"https://example.org/rows.csv?token={SECRET}"),
        ("--data", f"s3://rows/rows.csv?X-Signature={SECRET}&a=b"),
        ("--tokenizer", f"https://me:{SECRET}@example.org/x"),
        ("--log-with", f"http://me:{SECRET}@example.org"),
        ("--data", SECRET),
    ],
)
def test_errors(refusal, monkeypatch, tmp_path, option, value):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    if "://" in value:
        # By its place in the address, whatever it is.
        monkeypatch.delenv("HF_TOKEN")
    line = refusal("train", "decoder", option, value, "--output", tmp_path / "run")
    assert SECRET not in line
    assert "***" in line


def test_an_address_without_secrets_stays():
    text = "the Hub at https://huggingface.co/me/x@main did not give it (a@b)"
    assert without_secrets(text) == text


def test_what_is_logged(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    console = _Console()
    told = f"rows can't be reached: 503 for https://me:{SECRET}@example.org/x?Signature={SECRET} with hf_another"
    console.handle(logging.LogRecord("regard.training", logging.WARNING, "", 0, told, None, None))
    shown = "".join(capsys.readouterr())
    assert shown.strip() == "Warning: rows can't be reached: 503 for https://***@example.org/x?*** with ***"


def test_config_that_grows(refusal, tmp_path):
    line = refusal("train", "decoder", "--config", "hidden_size=&a [*a]", "--output", tmp_path / "run")
    assert "holds more than 100,000 values" in line
