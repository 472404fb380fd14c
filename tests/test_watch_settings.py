"""Settings of `watch` from a file: every key, every problem at once, nothing that is not bounded."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import UsageError
from ckpttool.watching.durations import seconds
from ckpttool.watching.settings import Settings
from ckpttool.watching.settingsfile import MOST, READERS, read_settings

TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML is read by Python 3.11 and later")

ALL = """
verify = true
migrate = true
to-hf = "models/{step}"
dtype = "bf16"
lora = "fuse"
hf_config = "/base"
callback = ["mine.upload:Upload", "mine.register.Register"]
exec = "upload.sh {path}"
shell = true
keep-last = 3
keep_every = 100
yes = true
pin = true
retries = 2
keep-going = true
role = "actor"
state = "state.json"
interval = "250ms"
background = true
patience = "1h30m"

[callback-config]
bucket = "s3://models"
parts = [1, 2]
"""


def written(folder: Path, text: str | bytes, name: str = "settings.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def as_json(folder: Path, **keys: Any) -> Path:
    return written(folder, json.dumps(keys), "settings.json")


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_settings(path)
    assert str(path) in caught.value.message
    return str(caught.value)


def everything(folder: Path) -> Settings:
    return Settings(
        verify=True,
        migrate=True,
        to_hf=f"{folder}/models/{{step}}",
        dtype="bf16",
        lora="fuse",
        hf_config="/base",
        callbacks=("mine.upload:Upload", "mine.register.Register"),
        callback_config={"bucket": "s3://models", "parts": [1, 2]},
        exec=("upload.sh {path}",),
        shell=True,
        keep_last=3,
        keep_every=100,
        yes=True,
        pin=True,
        retries=2,
        keep_going=True,
        roles=("actor",),
        state=f"{folder}/state.json",
        interval=0.25,
        background=True,
        patience=5400.0,
    )


@TOML
def test_every_setting_is_read_from_toml(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, ALL)) == everything(tmp_path)


def test_json_says_the_same(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    path = as_json(tmp_path, **tomllib.loads(ALL))
    assert read_settings(path) == everything(tmp_path)


def test_every_field_has_a_key() -> None:
    """Or a setting could not be given in a file."""
    assert sorted(field for field, _ in READERS.values()) == sorted(field.name for field in fields(Settings))


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert read_settings(as_json(tmp_path)) == Settings()
    assert read_settings(as_json(tmp_path, **dict.fromkeys(READERS))) == Settings()


def test_places_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to where a scheduler starts the trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "conf").mkdir()
    path = as_json(tmp_path / "conf", **{"to-hf": "../out/{step}", "hf-config": "~/base", "state": "s.json"})
    found = read_settings(path.relative_to(tmp_path))
    assert (found.to_hf, found.hf_config) == (f"{tmp_path}/conf/../out/{{step}}", "/home/me/base")
    assert found.state == f"{tmp_path}/conf/s.json"


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = as_json(
        tmp_path,
        **{
            "keep-lst": 3,
            "callbacks": "a.b",
            "upload": "x",
            "exec": ["ok", 3],
            "role": [],
            "verify": "yes",
            "shell": 1,
            "keep-last": 0,
            "keep-every": True,
            "retries": -1,
            "keep_going": False,
            "keep-going": False,
            "interval": 0,
            "patience": "soon",
            "callback-config": "a.json",
            "to-hf": " ",
            "dtype": ["bf16"],
        },
    )
    told = refused(path)
    assert told.splitlines() == [
        f"{path}: 15 problems in the settings",
        "  keep-lst: no such setting; did you mean keep-last?",
        "  callbacks: no such setting; did you mean callback?",
        "  upload: no such setting",
        "  exec: text is wanted, not 3",
        '  verify: true or false is wanted, not "yes"',
        "  shell: true or false is wanted, not 1",
        "  keep-last: 0 is too small; at least 1 is wanted",
        "  keep-every: a whole number is wanted, not true",
        "  retries: -1 is too small; at least 0 is wanted",
        "  keep-going: is there twice, with - and with _",
        "  interval: 0 is out of range; from 0.01 to 1e+09 seconds are wanted",
        "  patience: 'soon' is no time; write 30s, 10m, 2h or 1h30m",
        '  callback-config: a table is wanted, not "a.json"',
        '  to-hf: text is wanted, not " "',
        "  dtype: text is wanted, not a list",
    ]


@pytest.mark.parametrize("number", ["1e400", "NaN", "-1", "true", "[]"])
def test_a_time_is_a_finite_number(tmp_path: Path, number: str) -> None:
    assert "patience" in refused(written(tmp_path, f'{{"patience": {number}}}', "s.json"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\xff\xfe", "utf-8"),
        (b"{", "Expecting property name"),
        (b"[]", "not a table of settings, but a list"),
        (b"null", "not a table of settings, but nothing"),
        (b'{"exec": "a", "exec": "b"}', "exec: there twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MOST + 1), "more than is read"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    assert reason in refused(written(tmp_path, text, "settings.json"))


@TOML
def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    assert "line 1" in refused(written(tmp_path, "exec = upload.sh"))
    assert "a date or time" in refused(written(tmp_path, "exec = 2026-11-30"))


def test_without_tomllib_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert "write the same settings as JSON" in refused(written(tmp_path, ALL))


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert "TOML or JSON" in refused(written(tmp_path, "exec: x", "settings.yaml"))
    assert "No such file" in refused(tmp_path / "absent.json")
    (tmp_path / "folder.json").mkdir()
    assert "not a file" in refused(tmp_path / "folder.json")
    os.mkfifo(tmp_path / "pipe.json")
    assert "not a file" in refused(tmp_path / "pipe.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30s", 30), ("2h", 7200), ("1h30m", 5400), ("250ms", 0.25), ("1.5m", 90), ("45", 45), (" 1D ", 86400), ("0", 0)],
)
def test_times_are_read_as_people_write_them(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "s", "soon", "-1s", "1h 30m", "1x", "1h2h", "inf", "1e9", "٣s", "1s" * 1000])
def test_other_texts_are_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        seconds(text)
