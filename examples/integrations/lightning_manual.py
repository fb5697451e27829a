"""An actor and a critic in one LightningModule, each with an optimizer of its own: manual optimization.

    keepstep run --nproc-per-node 2 lightning_manual.py

The task is to choose, for a state of random numbers, the nearest of a few directions: the reward is the cosine
similarity of both. All backwards come before the first update.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from keepstep.integrations.lightning import KeepstepStrategy

WIDTH, NUM_ACTIONS = 8, 4


class States(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(self.first + index))


def network(num_outputs):
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, num_outputs))


class ActorCritic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = network(NUM_ACTIONS), network(1)
        directions = torch.randn(NUM_ACTIONS, WIDTH, generator=torch.Generator().manual_seed(7))
        self.register_buffer("directions", directions)

    def reward_of(self, states, actions):
        return nn.functional.cosine_similarity(states, self.directions[actions])

    def training_step(self, states, batch_idx):
        actor_optimizer, critic_optimizer = self.optimizers()
        choice = torch.distributions.Categorical(logits=self.actor(states))
        actions = choice.sample()
        rewards = self.reward_of(states, actions)
        values = self.critic(states).squeeze(-1)
        critic_loss = nn.functional.mse_loss(values, rewards)
        actor_loss = -(choice.log_prob(actions) * (rewards - values.detach())).mean() - 0.01 * choice.entropy().mean()
        self.log_dict({"actor_loss": actor_loss, "critic_loss": critic_loss, "reward": rewards.mean()})

        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        self.manual_backward(actor_loss)
        self.clip_gradients(actor_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic_optimizer.step()
        actor_optimizer.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def validation_step(self, states, batch_idx):
        self.log("val_reward", self.reward_of(states, self.actor(states).argmax(dim=1)).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(self.actor.parameters(), 1e-2), torch.optim.SGD(self.critic.parameters(), 0.1)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


def main(args):
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=KeepstepStrategy(find_unused_parameters=True),
        max_epochs=args.epochs,
        logger=CSVLogger("out"),
        log_every_n_steps=4,
        callbacks=[ModelCheckpoint("out/best", monitor="val_reward", mode="max")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_loader = DataLoader(States(120), batch_size=4, shuffle=True)
    trainer.fit(ActorCritic(), train_loader, DataLoader(States(60, first=120), batch_size=4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2, help="as many as torchrun starts on this node")
    parser.add_argument("--epochs", type=int, default=4)
    main(parser.parse_args())
