"""A client in NVFLARE: it trains with PyTorch and sends the whole model back."""

import sys

import numpy as np
import nvflare.client as flare
import torch
from net import Net
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, RATE, MOMENTUM = 32, 2, 0.05, 0.9


def main(folder: str) -> None:
    flare.init()
    with np.load(f"{folder}/{flare.get_site_name()}.npz") as file:
        samples = TensorDataset(torch.from_numpy(file["x"]), torch.from_numpy(file["y"]))
    batches = DataLoader(samples, BATCH, shuffle=True)
    model, loss = Net(), torch.nn.CrossEntropyLoss()
    while flare.is_running():
        model.load_state_dict(flare.receive().params)
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        model.train()
        for _ in range(EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        steps = {"NUM_STEPS_CURRENT_ROUND": EPOCHS * len(batches)}
        flare.send(flare.FLModel(params=model.state_dict(), meta=steps))


if __name__ == "__main__":
    main(sys.argv[1])
