"""Stage: will FP8, W4A16, W4A4 or W4A4+RAC rollouts hurt RL on this checkpoint? Answered before any RL is run.

    python -m quads.preflight MODEL --prompts FILE [--out DIR]
    -> DIR/preflight.{md,svg,png}, then DIR/preflight.json; a summary on the terminal

MODEL is a Hugging Face folder, FILE a .jsonl, or a .parquet with such columns, of `prompt` (and `response` where there
are any). One decoder layer is in memory at a time. Exit code 0 whatever the verdict, 1 for input that cannot be used, 3
with --strict when a verdict is `will hurt`. Defaults: quads.config.Preflight. Differs from quads.diagnose in that no
engine and no experiment is needed; its predictions are compared with engines in docs/preflight.md.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from quads.config import ConfigError, Preflight
from quads.config.errors import from_validation
from quads.files import ResultFileError, require_writable, write_json_atomic, write_text_atomic
from quads.lifeline import watch_parents

log = logging.getLogger("quads.preflight")

STRICT = 3
PROMPTS = "file of prompt [, response] or input_ids [, response_ids]: .jsonl, or .parquet with these columns"


def main(argv: list[str] | None = None) -> int:
    """Parse, run, write, print the summary."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    try:
        settings = make_settings(args)
        if args.out is not None:
            require_writable(args.out / "preflight.json")
        result = preflight(args.model, args.prompts, settings, args.device)
        if args.out is not None:
            write(result, args.out)
    except (ConfigError, ResultFileError) as error:
        log.error("%s", error)
        return 1
    from quads.diagnostics.preflight.render import summary
    from quads.diagnostics.preflight.report import is_hurt

    print(summary(result))
    return STRICT if args.strict and is_hurt(result) else 0


def _parser() -> argparse.ArgumentParser:
    fields = Preflight.model_fields
    parser = argparse.ArgumentParser(prog="python -m quads.preflight", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint (safetensors)")
    parser.add_argument("--prompts", type=Path, required=True, help=PROMPTS)
    parser.add_argument("--out", type=Path, help="folder for preflight.json, .md and the figure")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--strict", action="store_true", help=f"exit code {STRICT} when a verdict is `will hurt`")
    for name, kind in (
        ("gap", float),
        ("sequences", int),
        ("tokens", int),
        ("tokens_per_forward", int),
        ("generate", int),
        ("seed", int),
    ):
        text = f"{fields[name].description} (default {fields[name].default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text.replace("%", "%%"))
    chip = fields["chip"]
    parser.add_argument(
        "--chip", choices=get_args(chip.annotation), help=f"{chip.description} (default {chip.default})"
    )
    for name, value in (("rollouts", str), ("trainers", str), ("k", float)):
        text = f"{fields[name].description} (default {' '.join(map(str, fields[name].default))})"
        parser.add_argument(f"--{name}", nargs="+", type=value, help=text)
    parser.add_argument("--rac-k", type=float, help="k of the RAC that is judged (default 0.5)")
    parser.add_argument("--rac-granularity", help="block16 (default) or channel")
    parser.add_argument("--rac-mask", help="static (default) or token")
    parser.add_argument("--skip", nargs="+", default=[], help="more module-name parts to keep in high precision")
    return parser


def make_settings(args: argparse.Namespace) -> Preflight:
    """The options that were given, over the defaults. Raises ConfigError."""
    given: dict[str, Any] = {n: getattr(args, n) for n in Preflight.model_fields if getattr(args, n, None) is not None}
    rac = {n: v for n in ("k", "granularity", "mask") if (v := getattr(args, f"rac_{n}")) is not None}
    if rac:
        given["rac"] = rac
    if args.skip:
        given["keep_high_precision"] = (*Preflight().keep_high_precision, *args.skip)
    try:
        return Preflight(**given)
    except ValidationError as error:
        raise from_validation("command line", Preflight, error) from None


def preflight(model: Path, prompts: Path, settings: Preflight, device: str | None) -> dict[str, Any]:
    """The result, on `device` (default: cuda where there is one). Raises ConfigError."""
    import torch

    from quads.diagnostics.preflight.report import run

    if device is not None and not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise ConfigError(f"--device {device!r}: use cpu, cuda, or cuda:N for one of several")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch sees no CUDA device here; use cpu")
    if device is not None and int(device.partition(":")[2] or 0) >= max(torch.cuda.device_count(), 1):
        raise ConfigError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA device(s), from cuda:0")
    try:
        return run(model, prompts, settings, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of GPU memory ({error}); lower --sequences or --tokens (hidden states), --tokens-per-forward "
            f"(attention and experts), or use --gap 0 (fewer streams)"
        ) from error


def write(result: dict[str, Any], out: Path) -> None:
    """Report and figure, the JSON last."""
    from quads.diagnostics.preflight.figure import make_figure
    from quads.diagnostics.preflight.render import markdown
    from quads.paper.figures import save

    (out / "preflight.json").unlink(missing_ok=True)
    write_text_atomic(out / "preflight.md", markdown(result))
    save(make_figure(result), out / "preflight")
    write_json_atomic(out / "preflight.json", result)
    log.info("wrote %s", out / "preflight.json")


if __name__ == "__main__":
    sys.exit(main())
