"""On the CPU a process stays within its plan, although malloc keeps what torch has freed."""

import json
import subprocess
import sys

from megatrain.engine.host_heap import HeapLimit, anonymous_bytes

SCRIPT = """
import json, sys
import torch, megatrain
from transformers import AutoConfig
from megatrain.models.decoder import Decoder

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

def train(model, steps, seq):
    engine = megatrain.Engine(model, device="cpu", micro_batch=(2, seq), micro_batches=2,
                              memory={"host": "3GiB", "gpu": "3GiB"}, plan={"threads": 1})
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = [torch.randint(0, 2000, (2, seq), generator=generator) for _ in range(2)]
        engine.step([{"input_ids": i, "labels": i} for i in ids])
    return sum(engine.plan["totals"].values())

torch.set_num_threads(1)
config = AutoConfig.for_model("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
                              num_attention_heads=8, num_key_value_heads=8, vocab_size=2000)
decoder = Decoder.from_config(config, precision="fp32")
train(Decoder.from_config(config, precision="fp32"), 1, 8)  # code that is loaded at first use is no part of a plan
base = status("VmRSS")
planned = train(decoder, 3, 256)
print(json.dumps({"planned": planned, "taken": status("VmHWM") - base}))
"""


def test_a_process_takes_at_most_a_tenth_more_than_its_plan() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["planned"] > 200 << 20
    assert found["taken"] <= 1.1 * found["planned"], found


def test_the_heap_is_trimmed_only_past_the_plan_and_what_stays_is_the_new_base() -> None:
    resident, trims = [1000], []

    def release() -> None:
        trims.append(resident[0])
        resident[0] -= 300

    heap = HeapLimit(1000, 5000, lambda: resident[0], release)
    for resident[0], expected in ((6000, []), (6100, []), (6101, [6101])):
        heap.check()
        assert trims == expected
    assert heap.limit == 6100
    resident[0] = 9000  # another engine, say
    heap.check()
    heap.check()
    assert (trims, heap.limit) == ([6101, 9000], 8800)


def test_a_process_knows_what_it_holds() -> None:
    before = anonymous_bytes()
    held = bytearray(b"x" * (64 << 20))
    assert anonymous_bytes() - before >= 60 << 20
    assert held
