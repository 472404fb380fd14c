"""In which order the programs that train write a checkpoint, as acts of `tests.trainer`.

A producer saves one step of one or more roles. Right before its own signal is given it tells ``signal``, with the
``names`` of the checkpoints that this makes finished; after that it tells ``finished``, with what they hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.trainer import Act, Moment, move, tell, text, together, write

VERL_TRACKER = "latest_checkpointed_iteration.txt"
SKYRL_TRACKER = "latest_ckpt_global_step.txt"
Sources = Mapping[str, Path]
Save = Callable[[int, Sources], list[Act]]


def verl(step: int, roles: Sources) -> list[Act]:
    """One role after the other, the state of the data loader, the tracker."""
    folder = f"global_step_{step}"
    saved = [act for role, source in roles.items() for act in of_role(f"{folder}/{role}", source)]
    data = [text(f"{folder}/data.pt", f"the data loader at step {step}")]
    return [*saved, *data, *_tracked(VERL_TRACKER, step, [f"{folder}/{role}" for role in sorted(roles)])]


def skyrl(step: int, roles: Sources) -> list[Act]:
    """The same with other names."""
    folder = f"global_step_{step}"
    saved = [act for role, source in roles.items() for act in of_role(f"{folder}/{role}", source)]
    state = [text(f"{folder}/data.pt", "data"), text(f"{folder}/trainer_state.pt", "state")]
    return [*saved, *state, *_tracked(SKYRL_TRACKER, step, [f"{folder}/{role}" for role in sorted(roles)])]


def verl_sft(step: int, roles: Sources) -> list[Act]:
    """The step is the checkpoint."""
    folder = f"global_step_{step}"
    data = text(f"{folder}/data_0.pt", f"the data loader at step {step}")
    return [*of_role(folder, roles[""]), data, *_tracked(VERL_TRACKER, step, [folder])]


def verl_v2(step: int, roles: Sources) -> list[Act]:
    """Each role has a manifest, which is its signal; the tracker follows."""
    folder = f"global_step_{step}"
    saved = [act for role, source in roles.items() for act in _with_manifest(f"{folder}/{role}", source, step)]
    return [*saved, text(f"{folder}/data.pt", "data"), text(VERL_TRACKER, str(step))]


def verl_v2_asynchronous(step: int, roles: Sources) -> list[Act]:
    """Roles are written at the same time, and each one that is finished writes the tracker."""
    folder = f"global_step_{step}"
    scripts = [
        [*_with_manifest(f"{folder}/{role}", source, step), text(VERL_TRACKER, str(step))]
        for role, source in roles.items()
    ]
    return [text(f"{folder}/data.pt", "data"), together(*scripts)]


def megatron_lm(step: int, roles: Sources) -> list[Act]:
    """Data, index, `metadata.json`, tracker."""
    folder = f"iter_{step:07d}"
    return [*_archive(folder, roles[""], signal=_signal(step, [folder])), *_finished(step, [folder]), _lm(step)]


def _lm(step: int) -> Act:
    return text(VERL_TRACKER, str(step))


def nemo_rl(step: int, roles: Sources) -> list[Act]:
    """Everything under another name, which is changed in the end."""
    folder, names = f"tmp_step_{step}", [f"step_{step}/{role}/weights/iter_0000000" for role in sorted(roles)]
    saved = [act for role, source in roles.items() for act in of_role(f"{folder}/{role}/weights/iter_0000000", source)]
    info = [text(f"{folder}/training_info.json", json.dumps({"step": step})), text(f"{folder}/config.yaml", "a: 1\n")]
    return [*info, *saved, move(folder, f"step_{step}", last=_signal(step, names)), *_finished(step, names)]


def torchtitan(step: int, roles: Sources) -> list[Act]:
    """Data, then the index, which is renamed in."""
    folder = f"step-{step}"
    signal = _signal(step, [folder])
    return [*_ranks(folder, roles[""]), *_index(folder, roles[""], last=signal), *_finished(step, [folder])]


def trainer_of_transformers(step: int, roles: Sources) -> list[Act]:
    """Weights, arguments, optimizer, random numbers, and the state of the trainer last."""
    folder, source = f"checkpoint-{step}", roles[""]
    weights = [write(f"{folder}/{path.name}", path) for path in sorted(source.iterdir())]
    more = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    state = json.dumps({"global_step": step, "best_model_checkpoint": None}, indent=2)
    return [
        *weights,
        *(text(f"{folder}/{name}", f"{name} of step {step}") for name in more),
        text(f"{folder}/trainer_state.json", state, last=_signal(step, [folder])),
        *_finished(step, [folder]),
    ]


def unknown(step: int, roles: Sources) -> list[Act]:
    """Nobody says that it is finished."""
    folder = f"step_{step}"
    *acts, end = of_role(folder, roles[""])
    return [*acts, {**end, "last": _signal(step, [folder])}, *_finished(step, [folder])]


# Parts of a save


def of_role(folder: str, source: Path) -> list[Act]:
    """A role directory, in the order in which its manager writes it."""
    if (source / "dist_ckpt").is_dir():
        return [*_archive(f"{folder}/dist_ckpt", source / "dist_ckpt"), *_rest(folder, source, {"dist_ckpt"})]
    if list(source.glob("*.distcp")):
        return _archive(folder, source)
    if list(source.glob("model_world_size_*.pt")):
        return [*_ranks(folder, source), *_small(folder, source)]
    return [write(f"{folder}/{path.relative_to(source)}", path) for path in _files(source)]


def _with_manifest(folder: str, source: Path, step: int) -> list[Act]:
    archives = sorted(path.parent.relative_to(source) for path in source.rglob("dist_ckpt/metadata.json"))
    saved = [act for at in archives for act in _archive(f"{folder}/{at}", source / at)]
    rest = _rest(folder, source, {*map(str, archives), "ckpt_contents.json"})
    manifest = f"{folder}/ckpt_contents.json"
    written = write(f"{manifest}.tmp", source / "ckpt_contents.json")
    return [
        *saved,
        *rest,
        written,
        move(f"{manifest}.tmp", manifest, last=_signal(step, [folder])),
        *_finished(step, [folder]),
    ]


def _archive(folder: str, source: Path, signal: Moment | None = None) -> list[Act]:
    common = [write(f"{folder}/common.pt", source / "common.pt")] if (source / "common.pt").is_file() else []
    last = write(f"{folder}/metadata.json", source / "metadata.json", last=signal)
    return [*common, *_ranks(folder, source), *_index(folder, source), last]


def _index(folder: str, source: Path, last: Moment | None = None) -> list[Act]:
    temporary = f"{folder}/.metadata.tmp"
    return [write(temporary, source / ".metadata"), move(temporary, f"{folder}/.metadata", last=last)]


def _ranks(folder: str, source: Path) -> list[Act]:
    """Every rank writes its own files at the same time."""
    ranks: dict[str, list[Act]] = {}
    for path in _files(source):
        found = re.fullmatch(r"(?:.*_rank_(\d+)\.pt|__(\d+)_\d+\.distcp)", path.name)
        if found:
            ranks.setdefault(found[1] or found[2], []).append(write(f"{folder}/{path.name}", path))
    return [together(*ranks.values())]


def _small(folder: str, source: Path) -> list[Act]:
    """What rank 0 adds: the model's small files, and how it was sharded."""
    names = [path for path in _files(source) if not path.name.endswith(".pt")]
    ordered = sorted(names, key=lambda path: (path.name == "fsdp_config.json", str(path)))
    return [write(f"{folder}/{path.relative_to(source)}", path) for path in ordered]


def _rest(folder: str, source: Path, without: set[str]) -> list[Act]:
    paths = [path.relative_to(source) for path in _files(source)]
    rest = [path for path in paths if str(path) not in without and str(path.parent) not in without]
    return [write(f"{folder}/{path}", source / path) for path in rest]


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())


def _tracked(tracker: str, step: int, names: list[str]) -> list[Act]:
    return [text(tracker, str(step), last=_signal(step, names)), *_finished(step, names)]


def _signal(step: int, names: list[str]) -> Moment:
    return {"what": "signal", "step": step, "checkpoints": names}


def _finished(step: int, names: list[str]) -> list[Act]:
    return [tell("finished", step=step, names=names)]


PRODUCERS: Mapping[str, Save] = {
    "verl": verl,
    "verl-sft": verl_sft,
    "skyrl": skyrl,
    "verl-v1": verl,
    "verl-v2": verl_v2,
    "verl-v2-async": verl_v2_asynchronous,
    "megatron-lm": megatron_lm,
    "nemo-rl": nemo_rl,
    "torchtitan": torchtitan,
    "transformers": trainer_of_transformers,
    "unknown": unknown,
}
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("verl", "verl-sft", "skyrl", "unknown"), "fsdp"),
    **dict.fromkeys(("megatron-lm", "nemo-rl"), "torch_dist"),
    "verl-v1": "verl-megatron-v1",
    "verl-v2": "verl-megatron-v2",
    "verl-v2-async": "verl-megatron-v2",
    "torchtitan": "dcp",
    "transformers": "huggingface",
}
"""The word of `inspect` for what they write."""


def sources_of(producer: str, fsdp: Path, megatron: Path, data: Path) -> list[dict[str, Path]]:
    """Checkpoints of two saves by role: their files have the same names, and other contents."""
    archives = [data / "megatron/mcore0.14-dense-tp2", data / "megatron/mcore0.12-dense-tp2"]
    bare = [data / "fsdp/torch2.13-fsdp2", data / "fsdp/torch2.6-fsdp2"]
    match producer:
        case "verl":
            return [{"actor": fsdp / "fsdp2", "critic": fsdp / "critic"}, {"actor": fsdp / "fsdp1", "critic": bare[0]}]
        case "skyrl":
            return [{"policy": bare[0], "critic": bare[1]}, {"policy": bare[1], "critic": bare[0]}]
        case "verl-sft" | "unknown":
            return [{"": role} for role in bare]
        case "verl-v1":
            return [{"actor": megatron / "dense-v1"}, {"actor": megatron / "moe-v1"}]
        case "verl-v2":
            return [{"actor": megatron / "dense-v2-bridge"}, {"actor": megatron / "dense-v2"}]
        case "verl-v2-async":
            dense, bridge, moe = (megatron / name for name in ("dense-v2", "dense-v2-bridge", "moe-v2"))
            return [{"actor": dense, "critic": bridge}, {"actor": moe, "critic": dense}]
        case "nemo-rl":
            return [{"policy": archive} for archive in archives]
        case "torchtitan":
            return [{"": fsdp / "dcp/step-10"}, {"": fsdp / "accelerate/pytorch_model_fsdp_0"}]
        case "transformers":
            return [{"": megatron / "expected/dense-hf"}, {"": megatron / "expected/moe-hf"}]
    return [{"": archive} for archive in archives]
