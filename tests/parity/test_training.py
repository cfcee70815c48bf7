"""The same module and data in ``lightning.Trainer`` and in ours: weights, optimizers, hooks, logs, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from elastictrain.callback import StepInfo
from elastictrain.callbacks import GradientClipping
from tests.parity import data, talkative
from tests.parity import modules as m
from tests.parity.data import loader, tokens
from tests.parity.harness import Case, compare

VAL = loader(10, 4, seed=1)


def two() -> list[Any]:
    return [loader(10, 4, seed=1)(), loader(7, 3, seed=2)()]


# Sizes with batches of 4: 24 divides (6 batches), 23 leaves a short last batch, 22 with drop_last leaves 5 batches. With
# accumulation 4 and 5 the last window of an epoch is short or has one batch.
SIZES: list[tuple[int, dict[str, Any]]] = [(24, {}), (23, {}), (22, {"drop_last": True})]
FAST = {("Classifier", 1, 23), ("Classifier", 4, 23), ("Classifier", 5, 22), ("TinyLM", 4, 24), ("Simple", 5, 24)}


def _matrix() -> list[Any]:
    """Every module, accumulation and size; a few of them in the fast suite."""
    found = []
    for name in ("Simple", "Classifier", "TinyLM", "Schedulers", "OwnSteps"):
        for accumulate in (1, 4, 5):
            for size, options in SIZES:
                slow = (name, accumulate, size) not in FAST
                marks = [pytest.mark.slow] if slow else []
                found.append(pytest.param(getattr(m, name), accumulate, size, options, marks=marks))
    return found


@pytest.mark.parametrize(("module", "accumulate", "size", "options"), _matrix())
def test_modules_accumulations_and_sizes(
    module: Any, accumulate: int, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tokens if module is m.TinyLM else loader
    case = Case(module, source(size, 4, **options), source(10, 4, seed=3), accumulate=accumulate)
    theirs, _ = compare(case, tmp_path)
    assert theirs.calls
    assert len(theirs.csv.splitlines()) > 3


CASES: dict[str, Case] = {
    "gan": Case(m.GAN, loader(23, 4), VAL),
    "gan-even": Case(m.GAN, loader(24, 4), VAL, epochs=3),
    "manual-closure": Case(m.ManualClosure, loader(23, 4), VAL),
    "schedulers": Case(m.Schedulers, loader(23, 4), VAL, accumulate=4, epochs=4),
    "several-loaders": Case(talkative.SeveralLoaders, loader(23, 4), two, accumulate=4),
    "own-steps": Case(m.OwnSteps, loader(23, 4), VAL),
    "skips-epochs": Case(m.SkipsEpochs, loader(23, 4), VAL, epochs=3),
    "skips-epochs-4": Case(m.SkipsEpochs, loader(23, 4), VAL, epochs=3, accumulate=4),
    "lbfgs": Case(m.WithLBFGS, loader(23, 4), VAL),
    "lbfgs-4": Case(m.WithLBFGS, loader(23, 4), VAL, accumulate=4),
    "datamodule": Case(m.Simple, datamodule=data.Data, accumulate=4),
    "own-transfer": Case(m.OwnTransfer, loader(23, 4), VAL),
    "nested": Case(m.Nested, loader(23, 4), VAL, accumulate=5),
    "own-callbacks": Case(
        talkative.OwnCallbacks,
        loader(23, 4),
        VAL,
        epochs=6,
        callbacks=lambda: [m.pl.callbacks.EarlyStopping("val_loss")],
    ),
    "built-late": Case(m.BuiltLate, loader(23, 4), VAL),
    "no-optimizer": Case(m.WithoutOptimizer, loader(23, 4), VAL),
    "no-validation": Case(m.Simple, loader(23, 4)),
    "fails": Case(m.Fails, loader(23, 4), VAL, raises=KeyError),
    "fails-datamodule": Case(m.Fails, datamodule=data.Data, raises=KeyError),
    "no-epochs": Case(m.Simple, loader(23, 4), VAL, epochs=0),
    "every-step-logged": Case(m.Classifier, loader(23, 4), VAL, log_every=1),
    "no-step-logged": Case(m.Classifier, loader(23, 4), VAL, log_every=50),
}
SLOW = {"gan-even", "skips-epochs-4", "lbfgs-4", "fails-datamodule", "every-step-logged", "no-step-logged", "nested"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_what_modules_do(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path)


def _batch_sampler(size: int) -> Callable[[], DataLoader[Any]]:
    class Own(BatchSampler):
        pass

    points = data.samples(size)
    return lambda: DataLoader(points, batch_sampler=Own(SequentialSampler(points), 4, False))


DATA: dict[str, tuple[Callable[[], Any], bool]] = {
    "iterable": (lambda: data.Batches(23, 4, sized=True), True),
    "iterable-without-length": (lambda: data.Batches(23, 4, sized=False), True),
    "iterable-dataset": (lambda: DataLoader(data.Stream(23), batch_size=4), False),
    "batch-sampler": (_batch_sampler(23), True),
    "worker-processes": (loader(23, 4, num_workers=2), False),
}


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.slow] if k in ("iterable", "batch-sampler") else []) for k in DATA],
)
def test_kinds_of_data(kind: str, accumulate: int, tmp_path: Path) -> None:
    made, says_nothing = DATA[kind]
    ours = {"micro_batch_size": 4} if says_nothing and accumulate > 1 else {}
    case = Case(m.Classifier, made, VAL, accumulate=accumulate, loader_batch=4, ours=ours)
    theirs, _ = compare(case, tmp_path)
    assert theirs.trainer.global_step == 2 * -(-6 // accumulate)


@pytest.mark.parametrize(
    ("accumulate", "steps"),
    [
        (1, 4),  # in the middle of the first epoch
        (4, 3),  # in the middle of the second, after a short window
        *(pytest.param(a, s, marks=pytest.mark.slow) for a, s in ((1, 1), (1, 6), (1, 7), (4, 1), (5, 4))),
    ],
)
def test_a_limit_of_steps(accumulate: int, steps: int, tmp_path: Path) -> None:
    case = Case(m.Classifier, loader(23, 4), VAL, accumulate=accumulate, epochs=None, max_steps=steps)
    theirs, _ = compare(case, tmp_path)
    assert theirs.trainer.global_step == steps


@pytest.mark.parametrize(
    ("every", "accumulate"),
    [(2, 1), *(pytest.param(e, a, marks=pytest.mark.slow) for e, a in ((4, 2), (3, 1), (6, 2)))],
)
def test_validation_every_so_many_steps(every: int, accumulate: int, tmp_path: Path) -> None:
    """``val_every`` counts steps, ``val_check_interval`` batches."""
    compare(Case(m.Classifier, loader(24, 2), VAL, accumulate=accumulate, val_every=every), tmp_path)


@pytest.mark.parametrize(
    "where",
    [
        "training_step",
        "on_validation_epoch_end",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start")
        ),
    ],
)
def test_the_module_asks_to_stop(where: str, tmp_path: Path) -> None:
    theirs, _ = compare(Case(lambda: m.Stops(where), loader(23, 4), VAL, epochs=4), tmp_path)
    assert theirs.trainer.current_epoch < 4


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.1), pytest.param("value", 0.01, marks=pytest.mark.slow)])
def test_clipping(algorithm: str, limit: float, accumulate: int, tmp_path: Path) -> None:
    """Our callback does what the trainer's option does, and the module's own hook is told of it.

    But for the norm, which it logs besides (tests/callbacks/test_logging.py).
    """

    class Silent(GradientClipping):
        def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
            return {}

    class Clips(m.Simple):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            self.told.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer)

    for module in (m.Simple, Clips):
        case = Case(
            module,
            loader(23, 4),
            VAL,
            accumulate=accumulate,
            lightning={"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm},
            our_callbacks=lambda: [Silent(**{algorithm: limit})],  # type: ignore[arg-type]
        )
        theirs, _ = compare(case, tmp_path / module.__name__)
        unclipped, _ = compare(Case(m.Simple, loader(23, 4), VAL, accumulate=accumulate), tmp_path / "without")
        assert any((a != b).any() for a, b in zip(theirs.weights.values(), unclipped.weights.values(), strict=True))
