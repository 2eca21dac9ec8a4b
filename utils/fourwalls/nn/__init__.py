"""Models for one device: the oracle that every parallel run is compared with.

Plain modules over torch.nn.Module, small enough to read in one sitting, the same in any floating dtype and on the device `meta`,
with initial weights that are a function of (seed, parameter name) and never of the number of ranks.

    weights = draw(name, shape, seed)        data = batch(seed, step, rank)

Reference: Radford et al. 2019 (GPT-2) for the architecture.
"""
