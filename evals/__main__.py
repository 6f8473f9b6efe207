"""``python -m quantlab.evals run --model quantlab --model_args pretrained=DIR,policy=fp32/nvfp4@16 ...``

lm-eval's own command line with quantlab's model registered and its tasks among lm-eval's.  Further folders of tasks
go with ``--include_path A:B``; lm-eval itself reads that as one folder and finds nothing in it without a word.
"""

import os
import sys
from pathlib import Path
from typing import Any

from quantlab.errors import InputError
from quantlab.evals.plugin import TASK_FOLDER


def task_folders(include_path: str | Path | list[str | Path] | None) -> list[str | Path]:
    """quantlab's folder of tasks and those in ``include_path``, later ones first in doubt.

    Raises InputError for a folder that is not there.
    """
    if include_path is None:
        include_path = []
    named = include_path if isinstance(include_path, list) else str(include_path).split(os.pathsep)
    for folder in named:
        if not Path(folder).is_dir():
            raise InputError(
                "include_path", str(folder), f"folders of task files, separated by {os.pathsep!r}"
            )
    return [TASK_FOLDER, *named]


def main() -> None:
    from lm_eval import tasks

    class TaskManager(tasks.TaskManager):
        def __init__(self, *arguments: Any, include_path: Any = None, **options: Any):
            super().__init__(*arguments, include_path=task_folders(include_path), **options)

    tasks.TaskManager = TaskManager  # before lm-eval's command line takes it from there
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:
        # lm-eval's own for a name that no folder of tasks knows.
        if not isinstance(error, InputError) and not str(error).startswith("Tasks not found"):
            raise
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
