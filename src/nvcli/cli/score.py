"""`nvcli score`, `nvcli embed` and `nvcli classify`: jobs that score, embed or classify rows, without generating
anything."""

from __future__ import annotations

from typing import Annotated

from nvcli.cli.answer_files import JobOptions, run_job
from nvcli.cli.options import INPUT, Settings, keys_of, with_options

_WITHOUT = ("device", "seed", "job.text_field")


@with_options(*keys_of("", "job", "score", without=_WITHOUT))
def score(inputs: Annotated[list[str], INPUT], *, job: JobOptions, settings: Settings) -> None:
    """Compute how likely the model finds the texts of every row of INPUT, without generating anything.

    A row has a prompt as for `generate`, and a `continuation` or several `choices`, whose log-probabilities after the
    prompt are computed. With neither, the prompt itself is scored. If `answer` has the number, letter or text of the
    right choice, the summary says how many rows were right.

    INPUT, the output, and continuing a job work as in `generate`.

    \b
    Examples:
      nvcli score questions.jsonl -m Qwen/Qwen3-8B --normalize bytes
      nvcli score hf://cais/mmlu/abstract_algebra:test --prompt-field question -m demo -o scores.jsonl
      nvcli score texts.txt -m demo -o - | jq '.choices[0].perplexity'
    """
    run_job(inputs, job, settings, "score")


@with_options(*keys_of("", "job", "embed", without=_WITHOUT))
def embed(inputs: Annotated[list[str], INPUT], *, job: JobOptions, settings: Settings) -> None:
    """Compute an embedding (a vector) of every row of INPUT, with an embedding model.

    A row has a prompt as for `generate`. The checkpoint (modules.json) says which hidden states become the embedding,
    and whether its length is 1. An instruction such as "Instruct: …" is part of the prompt; --prompt-name takes one
    of the checkpoint's, --prompt-template adds any. Rows of OpenAI batch files for /v1/embeddings are answered in
    OpenAI's format.

    INPUT, the output, and continuing a job work as in `generate`. In Parquet an embedding is a list of floats.

    \b
    Examples:
      nvcli embed texts.jsonl -m Qwen/Qwen3-Embedding-0.6B -o vectors.parquet
      nvcli embed texts.csv -m Qwen/Qwen3-Embedding-8B --dimensions 256 --prompt-template 'Query: {text}'
    """
    run_job(inputs, job, settings, "embed")


@with_options(*keys_of("", "job", without=_WITHOUT))
def classify(inputs: Annotated[list[str], INPUT], *, job: JobOptions, settings: Settings) -> None:
    """Compute a reward or the classes of every row of INPUT, with a reward model, reranker or classifier.

    MODEL is a decoder with a classification head (LlamaForSequenceClassification and the like). A row has a prompt as
    for `generate`, or `messages` that end with the answer to judge: the chat template writes them, and begins no other
    answer. Each row gets the number of every class, as it is and as a probability.

    INPUT, the output, and continuing a job work as in `generate`.

    \b
    Examples:
      nvcli classify chats.jsonl -m Skywork/Skywork-Reward-Llama-3.1-8B-v0.2 -o rewards.parquet
      nvcli classify pairs.csv -m MODEL --prompt-template '<Query>: {query} <Document>: {document}'
      nvcli classify texts.txt -m MODEL -o - | jq .label
      nvcli classify chats.jsonl -m BASE --lora ADAPTER --hf-overrides \
        '{"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}'
    """
    run_job(inputs, job, settings, "classify")
