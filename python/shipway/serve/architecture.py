"""What ``max serve --custom-architectures`` loads: our decoder, on MAX's paged KV cache, behind MAX's server.

MAX keeps batching, paging, prefix cache, chunked prefill, sampling and the OpenAI endpoint; everything between tokens
and logits is our graph of our Mojo ops. The four architectures share one model: what sets them apart is in
:class:`~shipway.model.config.ModelConfig`. Imported by the server only.
"""

from __future__ import annotations

from dataclasses import replace

from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.pipelines.architectures.llama3 import Llama3Model, llama_arch
from max.pipelines.architectures.llama3.model import Llama3Inputs
from max.pipelines.context import TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import ModelInputs, ModelOutputs

from shipway.graphs.extension import kernels_extension, source_hash
from shipway.graphs.paged_decoder import build_paged_decoder
from shipway.model.arena import place
from shipway.model.checkpoint import open_checkpoint
from shipway.model.config import ARCHITECTURES as MODEL_CLASSES
from shipway.model.rope import rope_table
from shipway.routes.max_model import load_model, wrap_weights


class ServedModel(Llama3Model):
    """Llama 3's place in MAX's pipeline (inputs, KV cache, log-probabilities) with our graph and weights in it."""

    def load_model(self, session: InferenceSession) -> Model:
        """Compiles the decoder, or takes it from the artefact cache, and binds the weights of our own loader."""
        checkpoint = open_checkpoint(self.pipeline_config.model.model_path)
        config = checkpoint.config

        parts = {
            "sources": source_hash(),
            "config": config.computation(),
            "page_size": self.kv_params.page_size,
        }
        # The buffers read the arrays in place: the model holds on to them.
        self._weights = wrap_weights(place(checkpoint.weights, matrices="f32", vectors="f32"), "f32")
        self._table = Buffer.from_numpy(rope_table(config.rope, self.max_seq_len))
        model, _ = load_model(
            session,
            "serve",
            parts,
            lambda: build_paged_decoder(config, self.kv_params, kernels_extension(), DeviceRef.CPU()),
            self._weights,
        )
        return model

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs one step: logits of each sequence's last token."""
        assert isinstance(model_inputs, Llama3Inputs)
        assert self.batch_processor is not None
        return self.batch_processor.process_outputs(self.model.execute(*model_inputs.buffers, self._table))


def refuse_deadly(context: TextContext) -> None:
    """Raises (HTTP 400) for what would raise in the model's process, and there end the server.

    MAX itself refuses prompts that are empty or too long and sampling parameters out of range. It does not look at ids
    in a prompt given as ids, which the embedding would read past its end, nor at ``echo`` with ``logprobs``, which
    asks for logits of the prompt, nor at the size of ``top_k``, which its sampler allocates.
    """
    ids = context.tokens.prompt
    if not 0 <= ids.min() <= ids.max() < context.vocab_size:
        raise InputError(f"Prompt token ids must be in 0..{context.vocab_size - 1}.")
    if context.log_probabilities and context.log_probabilities_echo:
        raise InputError("echo together with logprobs is not supported.")
    if context.sampling_params.top_k > context.vocab_size:
        raise InputError(f"top_k must not exceed the {context.vocab_size} tokens of the vocabulary.")


ARCHITECTURES = [
    replace(
        llama_arch,
        name=name,
        pipeline_model=ServedModel,
        default_encoding="float32",
        supported_encodings={"float32"},
        multi_gpu_supported=False,
        context_validators=[refuse_deadly],
    )
    for name in MODEL_CLASSES.values()
]
