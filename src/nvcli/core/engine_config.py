"""EngineConfig: the configuration of one replica's engine and ranks, which is derived from a `RunConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from nvcli.core.config_types import (
    DraftPolicyName,
    FP8Accumulation,
    KeptWeights,
    KVCacheDtype,
    KVDtype,
    LoadFormat,
    ModelDtype,
)
from nvcli.core.lora_config import AdapterSizes
from nvcli.core.prompt_image import MAX_PROMPT_IMAGES, MOST_IMAGE_BYTES
from nvcli.core.task_config import DenseModule

MAX_DRAFT_STEP_TOKENS = 1024
"""Maximum tokens of a step whose decode rows have drafts. Beyond that the GPU takes so long that drafts gain
nothing."""

ANSWER_TABLE_BYTES = 8 << 20
"""Size of the table in which each rank looks drafts up that follow in other answers; a token takes 8 bytes."""


def kv_dtype(kv_cache_dtype: KVCacheDtype, dtype: ModelDtype) -> KVDtype:
    """Return the type in which a model whose weights are of `dtype` keeps keys and values."""
    if kv_cache_dtype == "auto":
        return dtype
    return "bfloat16" if kv_cache_dtype == "bf16" else "fp8"


_DRAFT_WIDTHS = (2, 3, 4, 6, 8, 12)
"""Tokens per decode row with drafts, besides the maximum. Each width has its own CUDA graphs."""
UNEVEN_WIDTHS = (1.5, 2.0, 3.0, 4.0)
"""Tokens per decode row, on average, of steps whose rows have different numbers of drafts. Each has its own graphs."""
UNEVEN_ROWS = 16
"""Fewest decode rows of such a step. With fewer, a draft costs next to nothing, as the weights are read anyway."""
_MOST_OF_UNEVEN, _MOST_OF_UNEVEN_OF_HEAD = 8, 6
"""Most tokens of a row in such a step. Attention takes its time from the longest row, and a head has as many passes."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one replica's engine and ranks, with every `auto` resolved."""

    model_path: Path
    """A local folder in Hugging Face layout."""
    hf_overrides: dict[str, Any] = {}
    """See `RunConfig`."""
    lora_path: Path | None = None
    """Local folder of the LoRA adapter that is merged into the weights; None: there is none."""
    device: Literal["cpu", "cuda"]
    dtype: ModelDtype
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    """Bytes for each rank; None: the rank decides."""
    block_size: int
    attention_backend: str
    """A name or `auto`; or `prefill:decode` with one of those on each side, if they differ."""
    enable_prefix_caching: bool
    enforce_eager: bool
    step_timeout: float
    enable_expert_parallel: bool = False
    enable_attention_dp: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
    """See `RunConfig`; `kv_dtype` resolves it."""
    pipeline_parallel_size: int = 1
    """Stages; rank = stage × `tensor_parallel_size` + the rank within the stage."""
    replica: int = 0
    """Index of this replica."""
    num_replicas: int = 1
    """Replicas that share this machine."""
    gpus: tuple[int, ...] = ()
    """GPU indices of all replicas, replica by replica, as a process numbers GPUs; empty: the first ones."""
    load_format: LoadFormat = "auto"
    """See `RunConfig`."""
    record_steps: bool = False
    """Report the times of every step to the parent, and each rank's peak memory at the end."""
    measure_memory: bool = False
    """Once everything is allocated, run the largest batches again and report the memory of each item."""
    quantization: KeptWeights = "none"
    """Format in which ranks keep the weights of linear layers."""
    fp8_accumulation: FP8Accumulation = "exact"
    """See `RunConfig`."""
    batch_invariant: bool = False
    """See `RunConfig`."""
    kv_blocks_before: int | None = None
    """KV blocks of the previous ranks, which ran out of memory; None: there were none. The new ranks take at most as
    many, and no more than fit into the memory that is now free."""
    prepare_grammars: bool = False
    """Load what constrained answers need along with the weights, because rows at the beginning of the job need it."""
    enable_cascade_attention: bool = True
    """See `RunConfig`."""
    plan_admission: bool = True
    """Admit as many requests as are forecast, from the answers so far, to fit into the KV cache until they end; false:
    as many as fit now, with preemption when room runs out."""
    max_draft_tokens: int = 0
    """Maximum tokens drafted to follow a row's last one; 0 turns drafts off."""
    draft_step_tokens: int | None = None
    """Maximum tokens of a step's decode rows together, if they have drafts, as the ranks find it from their memory
    (`sizing.memory.affordable_draft_tokens`); None: not known yet."""
    takes_forced_tokens: bool = True
    """Whether runs with drafts also take tokens that a grammar forces several at a time."""
    draft_head: str | None = None
    """The head that drafts tokens beside what is looked up: mtp, that of the checkpoint, or the folder of one; None:
    there is none."""
    draft_policy: DraftPolicyName = "auto"
    """`RunConfig.speculation.policy`"""
    draft_accept_rate: float | None = None
    """Accept each draft with this probability, whatever it is, and draft for every row; for benchmarks, whose answers
    mean nothing. None: look drafts up, and accept those that are right."""
    overlap_steps: bool = True
    """Schedule a step while the previous one runs; false: to measure what that gains."""
    lora_paths: tuple[Path, ...] = ()
    """Local folders of the LoRA adapters that requests choose from: adapter n is the n-th, from 1."""
    lora_sizes: AdapterSizes = AdapterSizes()
    """Their sizes, for estimates of memory."""
    max_loaded_adapters: int | None = None
    """Maximum adapters on the device at a time; None: the ranks decide."""
    merged_adapters: tuple[int, ...] = ()
    """Adapters of `lora_paths`, from 1, that are merged into the weights in turn while requests of one of them run."""
    merged_only_adapters: tuple[int, ...] = ()
    """Merged adapters that are served in no other way."""
    max_image_tokens: int = 0
    """The most tokens that an image of a prompt has; 0: prompts have no images, and the model needs no tower."""
    max_prompt_images: int = MAX_PROMPT_IMAGES
    """The most images of a prompt, where tiles between which there is text are images of their own."""
    whole_tokens: int = 0
    """The most tokens of an image or a prompt that are computed in one step because they attend to each other; 0:
    chunks may end anywhere."""
    keeps_prompts_whole: bool = False
    """Whether these are the tokens of every prompt; otherwise those of images, or of prompts with images."""
    embedding_size: int = 0
    """Size of the hidden states, if requests ask for these instead of tokens, or the number of a classifier's classes:
    the model then needs no LM head. 0: requests ask for tokens and their probabilities."""
    dense: tuple[DenseModule, ...] = ()
    """The linear layers that make embeddings of pooled hidden states."""

    @property
    def kv_dtype(self) -> KVDtype:
        """Data type of the KV cache."""
        return kv_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def placed_adapters(self) -> tuple[int, ...]:
        """Adapters of `lora_paths`, from 1, whose requests may run in the same steps as those of others."""
        numbers = range(1, 1 + len(self.lora_paths))
        return tuple(number for number in numbers if number not in self.merged_only_adapters)

    @property
    def weights_type(self) -> str:
        """The type of the weights, for people."""
        return self.dtype + {"none": "", "fp8": ", linear layers in FP8"}.get(
            self.quantization, ", linear layers in the checkpoint's bits"
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks (processes) of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def num_ranks_here(self) -> int:
        """Number of ranks of all replicas, which share the machine's RAM."""
        return self.num_replicas * self.num_ranks

    @property
    def num_homes(self) -> int:
        """The number of homes of a replica's requests (`engine.homes`): with attention by rows, one for each rank."""
        return self.tensor_parallel_size if self.enable_attention_dp else 1

    @property
    def finds_runs(self) -> bool:
        """Whether the ranks tell the engine of tokens that must come next in structured answers."""
        return self.max_draft_tokens > 0 and self.takes_forced_tokens

    @property
    def of_home(self) -> EngineConfig:
        """The same with the limits of the requests in one home."""
        return msgspec.structs.replace(
            self,
            max_num_seqs=-(-self.max_num_seqs // self.num_homes),
            max_num_batched_tokens=-(-self.max_num_batched_tokens // self.num_homes),
        )

    @property
    def most_step_tokens(self) -> int:
        """The most tokens of all homes in a step: `max_num_batched_tokens`, rounded up to equal shares."""
        return self.num_homes * self.of_home.max_num_batched_tokens

    @property
    def output_rank(self) -> int:
        """The rank that posts the sampled tokens: the first of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank, from 0."""
        return rank // self.tensor_parallel_size

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: `rank 2`, or with several stages `rank 2 of stage 1`."""
        return f"rank {rank}" if self.pipeline_parallel_size == 1 else f"rank {rank} of stage {self.stage_of(rank)}"

    def gpu_index(self, rank: int) -> int:
        """Return the index of a rank's GPU, among those that the process sees."""
        number = self.replica * self.num_ranks + rank
        return self.gpus[number] if self.gpus else number

    @property
    def max_num_decodes(self) -> int:
        """Maximum requests that decode in one step: with stages, a share of the running ones."""
        return -(-self.max_num_seqs // self.pipeline_parallel_size)

    @property
    def max_padded_rows(self) -> int:
        """Maximum rows of a step that is padded to the shape of a CUDA graph."""
        return self.max_num_seqs + self.max_num_decodes

    @property
    def max_padded_tokens(self) -> int:
        """Maximum tokens of a step that is padded to the shape of a CUDA graph."""
        return self.max_num_batched_tokens + self.max_num_decodes

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum steps in flight: one that runs and one that is queued, so that the device never waits for the host;
        with stages, one for each."""
        return max(2, self.pipeline_parallel_size) if self.overlap_steps else 1

    @property
    def max_shared_rows(self) -> int:
        """Maximum rows of a step that reads shared prefixes once for all requests; 0: no step does, because with
        `batch_invariant` results must not depend on what the batch shares, and with attention by rows none is served
        yet."""
        shares = self.enable_cascade_attention and self.enable_prefix_caching and not self.batch_invariant
        shares = shares and self.max_num_decodes > 1 and not self.enable_attention_dp
        return self.max_num_decodes if shares else 0

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """The numbers of tokens that decode rows with drafts may have, ascending; empty without drafts."""
        if not self.max_draft_tokens:
            return ()
        most = 1 + self.max_draft_tokens
        return (*(width for width in _DRAFT_WIDTHS if width < most), most)

    @property
    def uneven_draft_widths(self) -> tuple[float, ...]:
        """The numbers of tokens per decode row, on average, of steps whose rows have different numbers of drafts,
        ascending; empty where ranks would have to agree on the rows that are surest of a head's drafts."""
        if self.draft_head is not None and self.tensor_parallel_size > 1:
            return ()
        return tuple(mean for mean in UNEVEN_WIDTHS if mean < self.most_of_uneven)

    @property
    def most_of_uneven(self) -> int:
        """The most tokens of a row in such steps."""
        most = _MOST_OF_UNEVEN if self.draft_head is None else _MOST_OF_UNEVEN_OF_HEAD
        return min(most, 1 + self.max_draft_tokens)

    @property
    def image_message_bytes(self) -> int:
        """Maximum bytes of the images in a step's message."""
        return self.max_num_seqs * self.max_prompt_images * MOST_IMAGE_BYTES if self.max_image_tokens else 0

    @property
    def max_request_tokens(self) -> int:
        """Maximum tokens of a prompt and its answer. A prompt that is embedded may fill `max_model_len`: the token
        that ends its request comes after it, and is never computed."""
        return self.max_model_len + (self.embedding_size > 0)

    @property
    def max_row_tokens(self) -> int:
        """Maximum tokens of a request in the tables of a slot: drafts may reach beyond the longest answer."""
        return self.max_request_tokens + self.max_draft_tokens

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_row_tokens // self.block_size)

    @property
    def max_draft_step_tokens(self) -> int:
        """Maximum tokens of a step's decode rows together, if they have drafts; 0 without drafts."""
        if not self.max_draft_tokens:
            return 0
        most = min(self.max_num_decodes * (1 + self.max_draft_tokens), self.max_num_batched_tokens)
        if self.draft_step_tokens is not None:
            return min(most, self.draft_step_tokens)
        return min(most, max(MAX_DRAFT_STEP_TOKENS, self.max_num_decodes))

    @property
    def max_step_logits(self) -> int:
        """Maximum rows of logits in a step: one per request, or one per token of decode rows with drafts."""
        return self.max_num_seqs + self.max_draft_step_tokens
