"""What is wrong with a YAML file that a person has written, in one line.

On failure: :func:`reading` turns every way in which a file cannot be read or parsed into a
:class:`~elastictrain.errors.UsageError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from elastictrain.errors import UsageError


@contextmanager
def reading(what: str, *, kinds: str = "YAML") -> Iterator[None]:
    """Around opening and parsing ``what``, such as "--config run.yaml".

    Args:
        kinds: what the file may be written in, for the remedy.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not a text file in UTF-8: it must be {kinds}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{what}{line}: {problem}: correct the {kinds}") from error
