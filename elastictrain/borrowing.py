"""The weights of another run's checkpoint for a new run: fine-tuning.

Any layout takes them from any layout. Everything is read and compared with its hashes before a weight changes.

On failure: what does not fit is one error on every rank, with the names and the remedy, and no weight has changed. Damage is
a :class:`~elastictrain.checkpoint.DamagedError`: there is no other checkpoint to take instead of the one that was named.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elastictrain.checkpoint import CheckpointReader
from elastictrain.config import Weights
from elastictrain.errors import CheckpointError
from elastictrain.keeping import Stages, Telling, together
from elastictrain.session import Session
from elastictrain.state import TensorSpec, some

_MODEL = "model."


def borrow(session: Session, url: str, weights: Weights, *, telling: Telling) -> list[str]:
    """Fill the model's tensors from a checkpoint. A collective.

    Args:
        url: of the checkpoint that ``weights`` names, the same on every rank.
        telling: what is entered while its reader reads, see :mod:`elastictrain.restoring`.

    Returns:
        notes for the start-up summary.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit, and ``weights`` does not allow it.
    """
    s = session
    reader = together(s, lambda: CheckpointReader(url))
    held = {name: value for name, value in Stages(s).model().items() if isinstance(value, Tensor)}
    sources = _sources(reader.tensors, weights)
    everywhere = {name for names in s.ranks.gather(sorted(held)) for name in names}
    missing, surplus = sorted(everywhere - sources.keys()), sorted(sources.keys() - everywhere)
    if weights.strict and (missing or surplus):
        which = f"lacks {some(_bare(missing))}" if missing else f"also holds {some(_bare(surplus))}"
        raise CheckpointError(
            f"Weights({url}) {which}, unlike this model: give rename={{'old.': 'new.'}}, or strict=False to leave such"
            " names alone"
        )
    if not everywhere & sources.keys():
        raise CheckpointError(
            f"Weights({url}) has no name of this model, which begins with {some(_bare(sorted(everywhere)))}; it has"
            f" {some(_bare(sorted(sources)))}: give rename={{'old.': 'new.'}}"
        )
    here = [(name, sources[name], held[name]) for name in held if name in sources]
    misfits = [_misfit(name, target, reader.tensors[old], weights) for name, old, target in here]
    first = next((text for text in misfits if text is not None), None)
    if problems := [text for text in s.ranks.gather(first) if text is not None]:  # one stage of a pipeline sees it
        raise CheckpointError(f"Weights({url}): {problems[0]}")
    targets, casts = {}, []
    for _, old, target in here:
        spec = reader.tensors[old]
        if spec.dtype != target.dtype:
            scratch = torch.empty_like(target.detach(), dtype=spec.dtype)
            casts.append((target, scratch))
            target = scratch
        targets[old] = target
    with telling("model", reader):
        together(s, lambda: reader.load(targets))
    with torch.no_grad():
        for target, scratch in casts:
            target.copy_(scratch)
    notes = [f"weights of {url}"]
    if missing:
        notes.append(f"not in those weights, and new: {some(_bare(missing))}")
    if surplus:
        notes.append(f"in those weights only, and left out: {some(_bare(surplus))}")
    return notes


def _sources(saved: Mapping[str, TensorSpec], weights: Weights) -> dict[str, str]:
    """For each entry of the model as it is called here, the entry of the checkpoint."""
    found: dict[str, str] = {}
    for old in saved:
        if old.startswith(_MODEL):
            new = _MODEL + weights.named_here(old.removeprefix(_MODEL))
            if new in found:
                raise CheckpointError(
                    f"Weights(rename={dict(weights.rename)!r}) gives {some(_bare([found[new], old]))} the same name"
                    f" {new.removeprefix(_MODEL)}: rename one of them to something else"
                )
            found[new] = old
    return found


def _misfit(name: str, target: Tensor, spec: TensorSpec, weights: Weights) -> str | None:
    short = name.removeprefix(_MODEL)
    if tuple(target.shape) != spec.shape:
        return (
            f"{short} has shape {list(spec.shape)} there and {list(target.shape)} here: rename it to something that this"
            " model does not have, with strict=False"
        )
    if target.dtype != spec.dtype and not weights.cast:
        return f"{short} is {spec.dtype} there and {target.dtype} here: use cast=True"
    return None


def _bare(names: list[str]) -> list[str]:
    return [name.removeprefix(_MODEL) for name in names]
