#!/usr/bin/env python3
"""tools/check_interop.py SWITCHYARD MODEL [--work DIR] [--only gguf,llama,transformers]

Whether other programs read what `switchyard quantize` writes. SWITCHYARD is the program, MODEL a float checkpoint folder
with a tokenizer (models/default). It is written in many schemes, and then

  gguf          the gguf package reads each GGUF file, and the values it decodes are those of this engine's gguf-f32 copy
  llama         llama.cpp (llama-cpp-python) loads each GGUF file and gives logits close to this engine's
  transformers  transformers, with compressed-tensors, loads the bf16, fp8 and compressed-tensors folders, and gives logits
                close to this engine's

Needs a Python environment with numpy, safetensors and what is to be checked: gguf; llama-cpp-python (PyPI has its source
alone: building it takes some minutes); torch, transformers, accelerate and compressed-tensors. A package that cannot be
imported is reported as skipped. Not part of `make test`. Exits with 1 if a comparison failed.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file

GGUF_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
              "iq4_nl", "mxfp4"]
FOLDERS = ["bf16", "fp8_block", "w8a8_int8", "w4a16_g32", "w4a16_g128", "mxfp4"]
IDS = [1, 45, 90, 200, 301, 77, 12, 500, 23, 61, 140, 33, 95, 410, 8, 19]


class Checker:
    def __init__(self, program, model, work):
        self.program, self.model, self.work = program, model, work
        self.failed = False

    def run(self, *arguments):
        result = subprocess.run([self.program, *arguments], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def write(self, scheme):
        out = os.path.join(self.work, scheme + (".gguf" if scheme.startswith("gguf-") else ""))
        if not os.path.exists(out):
            self.run("quantize", self.model, out, "--scheme", scheme, "--json")
        return out

    def logits(self, model, *options):
        out = os.path.join(self.work, "logits.safetensors")
        self.run("logits", model, "--ids", ",".join(map(str, IDS)), "--output", out, *options)
        tensors = load_file(out)
        return tensors["logits"] if "logits" in tensors else next(iter(tensors.values()))

    def report(self, tool, scheme, difference, limit, what):
        good = difference <= limit
        self.failed = self.failed or not good
        print(f"{tool:12} {scheme:14} {'ok  ' if good else 'FAIL'} {what} {difference:.3g} (limit {limit:g})", flush=True)

    def skip(self, tool, why):
        print(f"{tool:12} skipped: {why}", flush=True)

    def check_logits(self, tool, scheme, mine, theirs, limit):
        """The root mean square of the difference at a position, relative to the spread of the logits; the median over
        the positions, because a router that is near a tie takes another expert for any change of its input."""
        differences = np.sqrt(np.mean((mine - theirs) ** 2, axis=1)) / np.std(mine)
        far = int(np.sum(differences > limit))
        self.report(tool, scheme, float(np.median(differences)), limit,
                    f"relative rms of logits ({far} of {len(differences)} positions beyond the limit)")


def check_gguf(checker):
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        return checker.skip("gguf", error)
    for name in GGUF_TYPES:
        path = checker.write("gguf-" + name)
        floats = os.path.join(checker.work, "decoded.gguf")
        checker.run("quantize", path, floats, "--scheme", "gguf-f32", "--force", "--json")
        theirs, mine = GGUFReader(path), GGUFReader(floats)
        decoded = {tensor.name: tensor for tensor in mine.tensors}
        worst = 0.0
        for tensor in theirs.tensors:
            if tensor.tensor_type.name == "BF16":
                values = (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = dequantize(tensor.data, tensor.tensor_type)
            other = decoded[tensor.name].data.astype(np.float32)
            scale = max(float(np.abs(other).max()), 1e-30)
            worst = max(worst, float(np.abs(values.reshape(-1) - other.reshape(-1)).max()) / scale)
        checker.report("gguf", name, worst, 1e-6, "relative difference of values")


def check_llama(checker):
    try:
        from llama_cpp import Llama
    except Exception as error:  # its shared library may be missing something
        return checker.skip("llama", error)
    for name in GGUF_TYPES:
        path = checker.write("gguf-" + name)
        llama = Llama(model_path=path, n_ctx=64, n_batch=64, logits_all=True, n_threads=2, verbose=False)
        llama.eval(IDS)
        theirs = np.array(llama.scores[:len(IDS)], dtype=np.float32)
        # llama.cpp quantises activations to 8 bits in products with blocks; with Q2_K its logits are 0.08 from those that
        # it computes itself from the decoded values in F32.
        checker.check_logits("llama", name, checker.logits(path), theirs,
                             0.01 if name in ("f32", "f16", "bf16") else 0.1)
        text = "Hello world! It's 42 o'clock,  \n and naïve 漢字."
        ids = checker.run("tokenize", path, "--text", text, "--ids").strip()
        same = [int(id) for id in ids.split(",")] == llama.tokenize(text.encode(), add_bos=False, special=True)
        if not same:
            checker.report("llama", name, 1, 0, "token ids differ")
        del llama


def check_transformers(checker):
    try:
        import torch
        import transformers
    except ImportError as error:
        return checker.skip("transformers", error)
    for scheme in FOLDERS:
        path = checker.write(scheme)
        # Its mxfp4 product takes bfloat16 alone.
        dtype, limit = (torch.bfloat16, 0.1) if scheme == "mxfp4" else (torch.float32, 0.02)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            with torch.no_grad():
                theirs = model(torch.tensor([IDS])).logits[0].float().numpy()
        except Exception as error:  # transformers 5.24 cannot join int8 experts of any checkpoint
            checker.skip("transformers", f"{scheme}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        checker.check_logits("transformers", scheme, checker.logits(path, "--no-activation-quant"), theirs, limit)
        del model


CHECKS = {"gguf": check_gguf, "llama": check_llama, "transformers": check_transformers}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--work", help="where the models are written; a temporary folder otherwise")
    parser.add_argument("--only", default=",".join(CHECKS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or temporary
        os.makedirs(work, exist_ok=True)
        checker = Checker(arguments.program, arguments.model, work)
        for name in arguments.only.split(","):
            CHECKS[name](checker)
    return 1 if checker.failed else 0


if __name__ == "__main__":
    sys.exit(main())
