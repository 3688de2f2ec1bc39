"""One run of llama-cpp-python, by the interpreter that has it installed; prints one JSON line.

Uses the C interface that the package exposes, so that nothing but the engine is timed: random tokens, no sampling,
flash attention on, an f16 KV cache, 512 tokens a pass.
"""
import argparse
import ctypes
import json
import random
import statistics
import sys
import time

import llama_cpp


def load(arguments):
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    if arguments.no_repack:
        params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {arguments.model}")
    return model


class Context:
    """A context of some sequences, each of up to `length` tokens."""

    def __init__(self, model, threads, sequences, length):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * 256 * -(-length // 256)
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        else:
            params.flash_attn = True
        self.handle = llama_cpp.llama_init_from_model(model, params)
        if not self.handle:
            sys.exit(f"llama.cpp makes no context of {sequences} sequences")
        self.sequences = sequences
        self.batch = llama_cpp.llama_batch_init(sequences, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def random_token(self):
        return random.randrange(self.vocab_size)

    def decode(self, batch):
        if llama_cpp.llama_decode(self.handle, batch) != 0:
            sys.exit("llama_decode failed")

    def prefill(self, count):
        tokens = (llama_cpp.llama_token * count)(*[self.random_token() for _ in range(count)])
        for at in range(0, count, 2048):
            size = min(2048, count - at)
            part = (llama_cpp.llama_token * size).from_buffer(tokens, at * ctypes.sizeof(llama_cpp.llama_token))
            self.decode(llama_cpp.llama_batch_get_one(part, size))
        llama_cpp.llama_synchronize(self.handle)

    def steps(self, count):
        """`count` tokens of each sequence."""
        for step in range(count):
            self.batch.n_tokens = self.sequences
            for row in range(self.sequences):
                self.batch.token[row] = self.random_token()
                self.batch.pos[row] = step
                self.batch.n_seq_id[row] = 1
                self.batch.seq_id[row][0] = row
                self.batch.logits[row] = 1
            self.decode(self.batch)
            llama_cpp.llama_synchronize(self.handle)

    def rate(self, work, count, repeats):
        """Tokens per second of work(count), the median."""
        rates = []
        for _ in range(repeats):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)
            start = time.perf_counter()
            work(count)
            rates.append(count * (self.sequences if work == self.steps else 1) / (time.perf_counter() - start))
        return statistics.median(rates)

    def end(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.handle)


def measure(arguments):
    model = load(arguments)
    context = Context(model, arguments.threads, 1, max(arguments.prompt, arguments.tokens))
    context.rate(context.prefill, min(arguments.prompt, 64), 1)
    context.rate(context.steps, min(arguments.tokens, 4), 1)
    line = {"pp_tps": context.rate(context.prefill, arguments.prompt, arguments.repeats),
            "tg_tps": context.rate(context.steps, arguments.tokens, arguments.repeats), "batch_tps": {}}
    context.end()
    for rows in [int(rows) for rows in arguments.batch.split(",") if rows]:
        context = Context(model, arguments.threads, rows, arguments.batch_tokens)
        context.rate(context.steps, min(arguments.batch_tokens, 4), 1)
        line["batch_tps"][rows] = context.rate(context.steps, arguments.batch_tokens, arguments.repeats)
        context.end()
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--first-token", action="store_true")
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--batch", default="")
    for name in ("threads", "prompt", "tokens", "repeats", "batch-tokens"):
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    random.seed(1)
    if arguments.probe:
        fields = [name for name, *_ in llama_cpp.llama_model_params._fields_]
        line = {"version": llama_cpp.__version__, "can_repack": "use_extra_bufts" in fields,
                "system": llama_cpp.llama_print_system_info().decode()}
    elif arguments.first_token:
        Context(load(arguments), arguments.threads, 1, 256).steps(1)
        line = {}
    else:
        line = measure(arguments)
    print("\n" + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
