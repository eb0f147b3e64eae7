"""A federation like that of `vector_fleet`, whose devices judge the models."""

import json
from pathlib import Path
from typing import Any

import msgspec

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.manifest import EVALUATE, MANIFEST, Manifest, Port, Signature, encode
from device_agent.formats.update import RECORD
from vector_fleet import CONFIG, VectorModel, trained

WITHOUT_SAMPLES = CONFIG.replace('held_out = "held_out.npz"\n', "")
WITHOUT_SAMPLES = WITHOUT_SAMPLES.replace(
    "[[devices]]", "[evaluation]\nshare = 0.5\n\n[[devices]]", 1
)


class JudgedModel(VectorModel):
    """A VectorModel whose bundles say that devices can evaluate them."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        files = super().bundle(submodel, round_)
        manifest = msgspec.json.decode(files[MANIFEST], type=Manifest)
        labels = Port(name="y", kind="labels", dtype="int64", shape=(None,))
        evaluate = Signature(
            graph="train.onnx",
            inputs=(labels,),
            outputs=tuple(
                Port(name=name, kind="metric", dtype="float32", shape=())
                for name in ("loss", "correct")
            ),
        )
        judged = msgspec.structs.replace(manifest, signatures={EVALUATE: evaluate})
        return {**files, MANIFEST: encode(judged)}


SOUND = EvaluationCounts(samples=10, counted=10, correct=6, loss_sum=4.0)


def update_with(
    link: CoordinatorClient, folder: Path, evaluation: dict[str, Any] | None
) -> tuple[int, Path]:
    """An update for the open round, whose record has `evaluation`, whatever it says."""
    work, _, update = trained(link, folder)
    record = json.loads((update / RECORD).read_bytes())
    if evaluation is not None:
        record["evaluation"] = evaluation
    (update / RECORD).write_text(json.dumps(record))
    return work.round, update


def both(counts: EvaluationCounts, **changes: Any) -> dict[str, Any]:
    """The field `evaluation` of a record: `counts` before and after, altered by `changes`."""
    before = {**msgspec.to_builtins(counts), **changes}
    return {"before": before, "after": before}


def counts(correct: int, of: int, loss: float | None = None) -> EvaluationCounts:
    wrong = float(of - correct) if loss is None else loss
    return EvaluationCounts(samples=of, counted=of, correct=correct, loss_sum=wrong)
