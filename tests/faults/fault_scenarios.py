"""What is disturbed: a command on a folder in some state, and what must go well afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from made import Made, awq, bf16, nvfp4, tensor
from sm70_convert.manifest import read_manifest
from sm70_convert.recorded import records_of, write_record

Command = tuple[object, ...]


class Place(NamedTuple):
    """Where a scenario happens. Commands name these paths; OUT is made anew for every fault."""

    model: Path
    out: Path
    other: Path

    def filled(self, command: Command) -> list[str]:
        places = {"MODEL": self.model, "OUT": self.out, "OTHER": self.other}
        words = [str(argument).split("/") for argument in command]
        return ["/".join([str(places.get(first, first)), *rest]) for first, *rest in words]


class Killed(NamedTuple):
    """A command that is killed before the k-th call of `op` on a path that ends so."""

    command: Command
    op: str
    path: str
    k: int = 1


class Scenario(NamedTuple):
    """A command that faults hit. `before` has made OUT (and OTHER), `after` finishes it, or finds it as it was.

    full: every fault at every call; else at the first and the last call of each line, and one of the like faults in turn.
    """

    name: str
    make: Callable[[], Made]
    before: tuple[Command | Killed, ...]
    command: Command
    after: tuple[Command, ...]
    full: bool = False
    prepare: Callable[[Place], object] = lambda _: None

    @property
    def torch(self) -> bool:
        """Whether the command imports torch."""
        return self.command[-2:] == TORCH or (self.command[0] == "verify" and "--source" in self.command)


def small() -> Made:
    """Two AWQ layers of one expert, a shard without experts, and a side file in a folder of its own."""
    made = awq(layers=2, experts=1, shards=2)
    made.add("model.visual.weight", tensor("BF16", (8, 8), bf16([0.5])), "visual.safetensors")
    made.others = {"assets/notes.txt": b"notes\n"}
    return made


def older() -> Made:
    """Two NVFP4 layers of two experts in two shards and a shard without experts, configured as older exporters do it."""
    made = nvfp4(layers=2, experts=2, shards=2)
    made.add("model.visual.weight", tensor("BF16", (8, 8), bf16([0.5])), "visual.safetensors")
    made.others["hf_quant_config.json"] = json.dumps(made.config.pop("quantization_config")).encode()
    return made


def torn(place: Place) -> None:
    """What a kill or a full disk can leave besides: half a line, half a file, and locks that nobody holds."""
    state = place.out / "sm70"
    with open(state / "journal.jsonl", "ab") as file:
        file.write(b'{"layer": 1, "ban')
    (state / "tp2/rank0/.layer-00001.safetensors.sm70-tmp").write_bytes(b"half")
    (state / ".journal-0.jsonl.lock").touch()


def recorded(place: Place) -> None:
    """What a runtime would have recorded of OUT."""
    for record in records_of(read_manifest(place.out), ""):
        write_record(place.other, record)


AWQ, NVFP4 = small, older
TP1 = ("MODEL", "--out", "OUT", "--tp-size", 1)
TP2 = ("MODEL", "--out", "OUT", "--tp-size", 2)
TP4 = ("MODEL", "--out", "OUT", "--tp-size", 4)
ONE, TWO = ("--jobs", 1), ("--jobs", 2)
VERIFY = ("verify", "OUT")
SEAL = ("seal", "OUT")
SOURCE = ("verify", "OUT", "--source", "MODEL")
SUMS = ("--hash", "sha256")
TORCH = ("--kernel", "torch")
PARTS = ((*TP2, "--layers", 0), (*TP2, "--layers", 1))
SECOND_LINE = Killed((*TP2, *ONE), "write", "sm70/journal.jsonl", 2)
FIRST_LINE = Killed((*TP2, *ONE), "write", "sm70/journal.jsonl")
BEFORE_SEAL = Killed(TP2, "open", ".model-00001-of-00002.safetensors.sm70-tmp")
AFTER_SEAL = Killed(TP2, "unlink", "sm70/journal.jsonl")
OVERWRITE = ("--interleave", "off")
STARTED_OVER = Killed((*TP2, *OVERWRITE, "--overwrite"), "unlink", "assets/notes.txt")

SCENARIOS = (
    Scenario("fresh, awq", AWQ, (), (*TP1, *ONE), (TP1,), full=True),
    Scenario("fresh, nvfp4, two jobs, sha256", NVFP4, (), (*TP2, *TWO, *SUMS), ((*TP2, *SUMS),)),
    Scenario("fresh, a layer at a time as on a device", AWQ, (), (*TP2, *ONE, *TORCH), (TP2,)),
    Scenario("resume", AWQ, (SECOND_LINE,), (*TP2, *ONE), (TP2,), prepare=torn),
    Scenario("addition, awq", AWQ, (TP1,), (*TP2, *ONE), (TP2,)),
    Scenario("addition, nvfp4, two jobs, sha256", NVFP4, ((*TP1, *SUMS),), (*TP2, *TWO, *SUMS), ((*TP2, *SUMS),)),
    Scenario("addition after another that began", NVFP4, (TP1, FIRST_LINE), (*TP4, *ONE), (TP4,)),
    Scenario("part", AWQ, PARTS[1:], (*PARTS[0], *ONE), (PARTS[0], SEAL)),
    Scenario("seal", NVFP4, PARTS, SEAL, (SEAL, TP2)),
    Scenario("seal --source", AWQ, PARTS, (*SEAL, "--source", "MODEL"), (SEAL, TP2)),
    Scenario("hard links", AWQ, (BEFORE_SEAL,), (*TP2, "--passthrough", "hardlink"), (TP2,)),
    Scenario("symlinks", NVFP4, (BEFORE_SEAL,), (*TP2, "--passthrough", "symlink"), (TP2,)),
    Scenario("after the seal", AWQ, (AFTER_SEAL,), TP2, (TP2,)),
    Scenario("start over", AWQ, (TP1,), (*TP2, *OVERWRITE, "--overwrite"), ((*TP2, *OVERWRITE),)),
    Scenario("after starting over", AWQ, (TP1, STARTED_OVER), (*TP2, *OVERWRITE), ((*TP2, *OVERWRITE),)),
    Scenario("verify", AWQ, (TP1,), VERIFY, (VERIFY,)),
    Scenario("verify, two jobs", NVFP4, (TP2,), (*VERIFY, *TWO), (VERIFY,)),
    Scenario("verify --source", AWQ, (TP1,), SOURCE, (SOURCE,)),
    Scenario("verify --source, nvfp4", NVFP4, (TP1,), SOURCE, (SOURCE,)),
    Scenario("verify --against", AWQ, (TP1, (*TP1[:2], "OTHER")), (*VERIFY, "--against", "OTHER"), (VERIFY,)),
    Scenario("verify --against records", AWQ, (TP1,), (*VERIFY, "--against", "OTHER"), (VERIFY,), prepare=recorded),
    Scenario("plan", AWQ, (TP1,), ("plan", "MODEL", "--tp-size", 1, "--scales"), (VERIFY,)),
    Scenario("dry run", AWQ, (), (*TP1, "--dry-run"), (TP1,)),
    Scenario("inspect", AWQ, (TP1,), ("inspect", "OUT"), (VERIFY,)),
    Scenario("inspect a checkpoint", NVFP4, (TP1,), ("inspect", "MODEL"), (VERIFY,)),
    Scenario("inspect a file", AWQ, (TP1,), ("inspect", "OUT/sm70-sentinel.safetensors"), (VERIFY,)),
)
