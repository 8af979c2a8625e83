"""One search over configurations of a training: each runs at most once, and what came of it is kept. No torch.

Configurations are batch sizes (``fit``), policies of a model (``estimate``), and layouts over ranks
(:mod:`graphckpt.config.layouts`). These modules say which one is next; here is what they share: results and errors by
configuration, the Pareto front, and lines of progress.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeAlias, TypeVar, final

from graphckpt.errors import ConfigError, drop_frames
from graphckpt.progress import Progress

_Configuration = TypeVar("_Configuration", bound=Hashable)
_Result = TypeVar("_Result")

Report: TypeAlias = Callable[[str], None]
"""Called with a line about what begins."""


@final
class Search(Generic[_Configuration, _Result]):
    """The configurations that were tried.

    Args:
        run: Returns the result of a configuration.
        skips: Whether an error of ``run`` is one of the configuration, which then has no result. Any other error is
            one of the program, and ends the search.
        where: Names a configuration in a note of an error.
    """

    def __init__(
        self,
        run: Callable[[_Configuration], _Result],
        skips: Callable[[Exception], bool],
        where: Callable[[_Configuration], str],
    ) -> None:
        self._run = run
        self._skips = skips
        self._where = where
        self.results: dict[_Configuration, _Result] = {}
        self.errors: dict[_Configuration, Exception] = {}
        """By configuration without a result: its error, or the one of the bound that rules it out."""

    def result(self, configuration: _Configuration) -> _Result | None:
        """Returns the result of a configuration, which runs if it has not yet; ``None`` if it has none."""
        if configuration not in self.results and configuration not in self.errors:
            try:
                self.results[configuration] = self._run(configuration)
            except Exception as error:
                if not self._skips(error):
                    error.add_note(self._where(configuration))
                    raise
                drop_frames(error, self._where(configuration))  # later configurations need their memory
                self.errors[configuration] = error
        return self.results.get(configuration)

    def possible(
        self, configurations: Iterable[_Configuration], reason_against: Callable[[_Configuration], str | None]
    ) -> list[_Configuration]:
        """Returns the configurations that no quick bound rules out; the reasons against the others become errors."""
        reasons = {configuration: reason_against(configuration) for configuration in configurations}
        self.errors |= {key: ConfigError(reason) for key, reason in reasons.items() if reason is not None}
        return [configuration for configuration, reason in reasons.items() if reason is None]


@contextmanager
def reporting(progress: Report | bool | None) -> Iterator[Report]:
    """Yields what gets lines of progress: the caller's function, or one that prints them from two seconds on."""
    if callable(progress):
        yield progress
    else:
        with Progress(is_shown=progress) as lines:
            yield lines.begin


def pareto(results: Sequence[_Result], costs: Callable[[_Result], Sequence[float]]) -> tuple[_Result, ...]:
    """Returns the Pareto-optimal results, in their order: no other one has a lower cost, and none that is higher.

    >>> pareto([(3, 1), (2, 2), (3, 2), (2, 2)], costs=lambda pair: pair)
    ((3, 1), (2, 2), (2, 2))
    """
    rows = [(result, tuple(costs(result))) for result in results]

    def is_worse(figures: Sequence[float], others: Sequence[float]) -> bool:
        return figures != others and all(one >= another for one, another in zip(figures, others, strict=True))

    return tuple(result for result, figures in rows if not any(is_worse(figures, others) for _, others in rows))
