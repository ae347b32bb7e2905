"""Cards and their memory, on a machine with one or two CUDA cards: what is free, with which card's memory an engine is
planned, and that the caller's current device stays as it was.

Run: python tests/gpu/check_devices.py. Prints one JSON line a check; exits 1 on a miss. With one card, the checks of a
second one are left out and said to be.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megatrain
from megatrain import _core
from megatrain.errors import DoesNotFit
from megatrain.system import hardware
from megatrain.system.hardware import GIB, MIB

CONFIG = Qwen2Config(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("DEVICES " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def gpu(card: int) -> hardware.Gpu:
    """What the planner knows of a card now."""
    found = hardware.read().with_free_memory(card).gpu
    assert found is not None
    return found


def free_memory(card: int) -> bool:
    """The context is not held by others; tensors of the caller are; blocks that torch only caches are not."""
    with torch.cuda.device(card):
        idle = gpu(card)
        free, total = torch.cuda.mem_get_info(card)
        ok = say(
            "context",
            total == idle.total_bytes,
            name=idle.name,
            planned_mib=idle.context_bytes // MIB,
            # On an idle card all that is not free is the context: this may not be more than is planned.
            not_free_mib=(total - free) // MIB,
            held_mib=idle.held_bytes // MIB,
        )
        size = min(4 * GIB, free // 2)
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        held = gpu(card).held_bytes - idle.held_bytes
        ok &= say("a tensor of the caller is held", abs(held - size) < 700 * MIB, held=held, size=size)
        del tensor
        held = gpu(card).held_bytes - idle.held_bytes
        return ok & say("a cached block is not", held < 64 * MIB, held=held)


def refusal(card: int) -> bool:
    """With nearly the whole card taken, an engine is refused with the sum instead of running out of memory."""
    with torch.cuda.device(card):
        free, _ = torch.cuda.mem_get_info(card)
        taken = torch.empty(free - 600 * MIB, dtype=torch.uint8, device="cuda")
        try:
            megatrain.Engine(model(), device=f"cuda:{card}", micro_batch=(4, 512), micro_batches=1).close()
        except DoesNotFit as error:
            return say("a full card is refused", True, said=str(error).partition("\n")[0])
        finally:
            del taken
            torch.cuda.empty_cache()
    return say("a full card is refused", False)


def model() -> torch.nn.Module:
    """A small model."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


def step(device: Any) -> tuple[float, int]:
    """Loss of the second step, and the index of the card that it ran on."""
    engine = megatrain.Engine(model(), device=device, max_grad_norm=1.0)
    ids = torch.arange(512).reshape(2, 256) % CONFIG.vocab_size
    batch = {"input_ids": ids, "labels": ids}
    engine.step([batch])
    loss = float(engine.step([batch]).loss)
    index = engine._runtime.device.index
    engine.close()
    return loss, index


def own_card(number: int, current: int) -> bool:
    """An engine on one card while another is current: the same loss, and the caller's device stays."""
    torch.cuda.set_device(current)
    ok = True
    for device in (f"cuda:{number}", torch.device("cuda", number), _core.Device.cuda(number)):
        loss, index = step(device)
        stays = torch.cuda.current_device() == current
        ok &= say(f"{device!r} while cuda:{current} is current", stays and index == number, loss=loss, index=index)
    torch.cuda.set_device(number)
    loss, index = step("cuda")
    ok &= say("cuda is the current device", index == number, loss=loss, index=index)
    torch.cuda.set_device(0)
    return ok


def main() -> int:
    """Runs the checks that this machine has cards for."""
    cards = torch.cuda.device_count()
    ok = free_memory(0) & refusal(0) & own_card(0, 0)
    if cards > 1:
        ok &= free_memory(1) & refusal(1) & own_card(1, 0) & own_card(0, 1)
    else:
        print("DEVICES " + json.dumps({"check": "a second card", "ok": True, "left_out": "there is one card"}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
