"""In the shape of the scripts of Hugging Face Transformers, with a trainer of its own beside the plain one."""

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTTrainer


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs).loss * 2


def main(dataset):
    args = TrainingArguments(output_dir="out", num_train_epochs=3)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()
    WeightedTrainer(model=model, args=args, train_dataset=dataset).train()
    SFTTrainer(model=model, args=args, train_dataset=dataset).train()
