"""Which server owns which weights: a rule that every rank can work out alone, and that no restart changes.

A key is the name of a parameter. Either a key goes whole to the server that a hash of its name picks, as a key-value store
does it, and large keys make large differences; or every key is cut into a piece for each server, and no server has more than
its share. What a worker sends to a server is one flat tensor of all its pieces, in the order of the keys.

    hash: owner(key) = hash(key) mod servers          cut: server j owns chunk j of every key

Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 3.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch

from ..cost.collectives import chunk_sizes

__all__ = ["RULES", "KeyMap", "place_keys", "sizes_of"]

RULES = ("cut", "hash")


@dataclass(frozen=True)
class KeyMap:
    """pieces[key]: (server, start, stop) of its flat elements, one after the other. Made by `place_keys`."""

    servers: int
    pieces: dict[str, tuple[tuple[int, int, int], ...]] = field(hash=False)

    def owners(self, key: str) -> tuple[int, ...]:
        """The servers that own a piece of `key`. ValueError, which names it, for a key that no server owns."""
        if key not in self.pieces:
            near = get_close_matches(key, self.pieces, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no server owns the key {key!r}; there are {len(self.pieces)} keys{hint}")
        return tuple(server for server, _, _ in self.pieces[key])

    def elements(self, server: int) -> int:
        """How many elements `server` owns."""
        return sum(stop - start for pieces in self.pieces.values() for who, start, stop in pieces if who == server)

    def pack(self, server: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The pieces that `server` owns, as one flat tensor. ValueError for a tensor whose key no server owns, or a key without
        a tensor.
        """
        self._same_keys(tensors)
        parts = [
            tensors[key].detach().reshape(-1)[start:stop]
            for key, pieces in self.pieces.items()
            for who, start, stop in pieces
            if who == server
        ]
        return torch.cat(parts) if parts else next(iter(tensors.values())).new_empty(0)

    @torch.no_grad()
    def unpack(self, server: int, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the pieces of `server` into the tensors, in place: the inverse of `pack`."""
        self._same_keys(tensors)
        place = 0
        for key, pieces in self.pieces.items():
            for who, start, stop in pieces:
                if who == server:
                    tensors[key].view(-1)[start:stop] = flat[place : place + stop - start]
                    place += stop - start
        assert place == flat.numel(), f"server {server} has sent {flat.numel()} elements of {place}"

    def _same_keys(self, tensors):
        for key in tensors:
            self.owners(key)
        lacking = [key for key in self.pieces if key not in tensors]
        if lacking:
            raise ValueError(f"key {lacking[0]!r} has an owner, but no tensor was given for it")


def place_keys(sizes: Mapping[str, int], servers: int, *, rule: str = "cut", assign: Mapping[str, int] | None = None) -> KeyMap:
    """The owners of keys with so many elements each. assign: key -> server, in place of the rule.

    Raises ValueError for a rule or number of servers that does not exist, and for a key that `assign` gives to no server, by
    name.
    """
    if not isinstance(servers, int) or isinstance(servers, bool) or servers < 1:
        raise ValueError(f"servers is {servers!r}; at least 1")
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; allowed: {', '.join(RULES)}")
    if not sizes:
        raise ValueError("there are no keys: the model has no parameter that is trained")
    pieces = {}
    for key, size in sizes.items():
        if assign is not None:
            owner = assign.get(key)
            if not isinstance(owner, int) or not 0 <= owner < servers:
                raise ValueError(f"no server owns the key {key!r}: it is given to {owner!r}, and servers are 0 to {servers - 1}")
            pieces[key] = ((owner, 0, size),)
        elif rule == "hash":
            pieces[key] = ((_hash(key) % servers, 0, size),)
        else:
            pieces[key], start = [], 0
            for server, many in enumerate(chunk_sizes(size, servers)):
                pieces[key].append((server, start, start + many))
                start += many
            pieces[key] = tuple(pieces[key])
    return KeyMap(servers, pieces)


def sizes_of(model: torch.nn.Module) -> dict[str, int]:
    """name -> elements of each parameter that is trained; tied ones once, frozen ones not at all.

    Raises ValueError where dtypes differ: a server's weights are one flat tensor.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = {p.dtype: name for name, p in trained.items()}
    if len(kinds) > 1:
        raise ValueError(f"parameters of different dtypes: {', '.join(f'{n} is {d}' for d, n in kinds.items())}; use one")
    return {name: p.numel() for name, p in trained.items()}


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
