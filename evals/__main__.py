"""``python -m quantlab.evals run --model quantlab --model_args pretrained=DIR,policy=fp32/nvfp4@16 ...``

lm-eval's own command line with quantlab's model registered and its task folder on the search path.
"""

import sys

from quantlab.evals.plugin import TASK_FOLDER


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    if sys.argv[1:2] in (["run"], ["ls"]) and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASK_FOLDER)]
    cli_evaluate()


if __name__ == "__main__":
    main()
