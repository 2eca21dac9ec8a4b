"""What can be turned in the memory explorer: cards, presets, the values of each control, and the switches that save.

A setting is plain data; `training_of` makes it a `Training`, or says what is legal.

    setting = START, then a preset's changes, then the reader's

Reference: Korthikanti et al. 2022 (arXiv:2205.05198), Table 3; Rajbhandari et al. 2020 (arXiv:1910.02054), Table 1; Devlin et al.
2018 (arXiv:1810.04805).
"""

from collections.abc import Mapping
from dataclasses import replace

from ..cost.hardware import DEVICES
from ..cost.shape import MODELS
from ..cost.stage_memory import SEQUENCE, Training, gated_width, stage_memory

__all__ = ["CARDS", "OPTIONS", "PRESETS", "START", "SWITCHES", "read", "tallest", "training_of"]

CARDS = {"16 GB": 16 * 10**9} | {name: DEVICES[name].memory_bytes for name in ("V100", "A100-40GB", "A100", "H100")}
START = {"model": "175B", "card": "A100", "batch": 64, "b": 1, "s": 2048, "t": 8, "p": 8, "d": 1, "zero": 0, "sequence": "off"}
START |= {"recompute": "none", "precision": "mixed", "schedule": "1f1b", "v": 2, "attention": "whole", "kv": 0, "gated": False}
_ONE = {"t": 1, "p": 1, "d": 1}
PRESETS = {
    "GPT-3 on 64 A100s": {},
    "BERT-Large on 16 GB": {"model": "bert-large", "card": "16 GB", "batch": 32, "b": 32, "s": 512, **_ONE},
    "ZeRO's 7.5B on 64 ranks": {"model": "7.5B", "card": "V100", **_ONE, "d": 64},
    "2.8 TB: GPT-3 on one card": {"batch": 1, "recompute": "full", **_ONE},
    "22B on 8 A100s": {"model": "22B", "batch": 4, "b": 4, "p": 1, "precision": "mixed-fp32-gradients"},
    "1T on 512 A100s": {"model": "1T", "batch": 512, "p": 64, "sequence": "gather again", "recompute": "selective"},
    "LLaMA 3 8B, long": {"model": "llama3-8b", "s": 8192, "zero": 3, "attention": "tiled", "recompute": "full", **_ONE, "d": 64},
}
_POWERS = [2**k for k in range(11)]
OPTIONS = {
    "model": [name for name, shape in MODELS.items() if shape.experts == 1],
    "card": list(CARDS),
    "batch": [*_POWERS, 280, 1536],
    "b": _POWERS[:8],
    "s": [128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "t": _POWERS[:5],
    "p": [1, 2, 4, 8, 16, 32, 35, 64],
    "d": _POWERS,
    "zero": [0, 1, 2, 3],
    "sequence": list(SEQUENCE),
    "recompute": ["none", "selective", "full"],
    "precision": ["fp32", "mixed", "mixed-fp32-gradients", "half"],
    "schedule": ["gpipe", "1f1b", "interleaved"],
    "v": [2, 3, 4],
    "attention": ["whole", "tiled"],
    "kv": [0, 1, 2, 4, 8, 16],  # 0: as the model has them
    "gated": [False, True],  # False: as the model has it
}
OPTIONS["batch"].sort()
# a switch: what it is called, and what it turns
SWITCHES = {
    "sequence parallelism, gathered again": {"sequence": "gather again"},
    "sequence parallelism, kept": {"sequence": "keep"},
    "selective recomputation": {"recompute": "selective"},
    "attention in tiles": {"attention": "tiled"},
    "ZeRO 1": {"zero": 1},
    "two chunks a rank, interleaved": {"schedule": "interleaved"},
}


def read(setting: Mapping) -> dict:
    """A whole setting: what is lacking is taken from START. ValueError for a word or a value that there is not."""
    unknown = sorted(set(setting) - set(START))
    if unknown:
        raise ValueError(f"a setting has {', '.join(START)}; not {', '.join(unknown)}")
    now = {**START, **setting}
    for word, value in now.items():
        if value not in OPTIONS[word] or isinstance(value, bool) is not isinstance(START[word], bool):
            raise ValueError(f"{word} is {value!r}; allowed: {', '.join(map(str, OPTIONS[word]))}")
    return now


def training_of(setting: Mapping) -> Training:
    """The training that a setting describes. ValueError, with what is legal, for one that cannot be."""
    now = {**START, **setting}
    shape = MODELS[now["model"]]
    own = {"length": now["s"]}
    if now["kv"]:
        own["kv_heads"] = now["kv"]
    if now["gated"] and not shape.gated:
        own |= {"gated": True, "ff": gated_width(shape.width)}
    shape = replace(shape, **own)
    return Training(
        shape, now["batch"], now["b"], tp=now["t"], pp=now["p"], dp=now["d"], zero=now["zero"], sequence=now["sequence"],
        recompute=now["recompute"], precision=now["precision"], schedule=now["schedule"], chunks=now["v"],
        flash=now["attention"] == "tiled", dropout=shape.positions,
    )  # fmt: skip


def tallest(setting: Mapping) -> float:
    training = training_of(setting)
    return max(float(stage_memory(training, k).total) for k in range(training.pp))
