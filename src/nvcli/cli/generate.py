"""`nvcli generate`: answers the rows of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from nvcli.cli.answer_files import JobOptions, run_job
from nvcli.cli.options import INPUT, Settings, keys_of, with_options
from nvcli.cli.prompt import answer_prompts, check_prompt_options
from nvcli.core.flags import PROMPTS, Flag


@with_options(*keys_of("", "speculation", "job", "sampling", without=("device",)))
def generate(
    inputs: Annotated[list[str] | None, INPUT] = None,
    *,
    prompts: Annotated[
        Sequence[str],
        Flag("--prompt -p", PROMPTS, "Print the answer to TEXT, in place of INPUT; may be repeated.", "TEXT"),
    ] = (),
    raw: Annotated[bool, Flag("--raw", PROMPTS, "With -p: continue TEXT as it is, without the chat template.")] = False,
    job: JobOptions,
    settings: Settings,
) -> None:
    """Answer every row of INPUT with the model, into one output file, or one for each input.

    INPUT is JSONL: a row has `prompt`, `messages` or `prompt_token_ids`, and may have `id`, `sampling` and
    `chat_template_kwargs`; all other keys are passed through. Rows of OpenAI batch files are answered in OpenAI's
    format. By its file extension it may also be a JSON array (.json), CSV or TSV, plain text with a prompt on each line
    (.txt), PDF with a row for each page, Parquet, or Arrow; all but the last three may end in .gz, .zst, .bz2 or .xz.
    `-` is standard input, a quoted pattern matches many files, a folder is a dataset on disk,
    hf://OWNER/NAME/CONFIG:SPLIT one on the Hugging Face hub, and https://, s3:// and gs:// name remote files. The
    output is JSONL, CSV, TSV or Parquet, by its name.

    An existing output is continued: the same command finishes a job that was cut short. With --update it
    follows an INPUT with corrected, new or removed rows.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli generate -p 'What is 3+4?' -m demo
      nvcli generate questions.jsonl -m Qwen/Qwen3-8B --tp 2 -o answers.jsonl
      nvcli generate questions.jsonl -m demo --temperature 0 --max-tokens 256 --stop Question:
      nvcli generate a.jsonl b.jsonl.gz -c configs/demo.yaml -o out.jsonl --set job.order=input
      cat questions.jsonl | nvcli generate - -m demo | jq '.choices[0].text'
    """
    inputs = inputs or []
    check_prompt_options(inputs, prompts, raw=raw, job=job, flags=settings.flags)
    if prompts:
        raise typer.Exit(answer_prompts(settings.load(), prompts, raw=raw))
    run_job(inputs, job, settings)
