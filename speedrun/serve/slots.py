"""Places for texts that are written at the same time: feed tokens, get the next one's logits.

A text has a slot with a key/value cache of its own. Prompts are read in one pass of the model;
single tokens of all texts go through one call of the decoder, where there is one, and so do short
prompts. The cache holds
as many tokens as the model was trained on; when it is full the older half is forgotten and the rest
is read again, so a text may be of any length. A model with blocks of a user's own, which may not
follow the cache, reads all of a text for each of its tokens then: slow, and right.

What a text is given depends on its own tokens alone, to the bit, so nobody can tell from a text who
else was being served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speedrun.data.loader import document_ids
from speedrun.model.cache import Cache
from speedrun.model.decode import Draws, decoder_for
from speedrun.model.gpt import GPT
from speedrun.model.linear import Linear
from speedrun.model.parts import telling
from speedrun.model.plan import AttentionPlanner
from speedrun.model.steps import PackedWeights
from speedrun.model.trial import follows_cache
from speedrun.serve.sampling import Logits

# Tokens of a prompt that the decoder takes one by one before the model would have read them at
# once: as many as go through these weights in the 2 ms that a pass of the model takes at the least.
# A rule on model and text alone: which way tokens went shows in the last bits of a text's logits.
FEW, FEW_WEIGHTS = 24, 50_000_000


@dataclass(frozen=True)
class Sight:
    """What the last token of a text sees: of all its tokens, those from `first` on."""

    first: int
    read_from: int  # tokens before it were forgotten when the cache was full
    documents: tuple[int, ...]  # where documents begin


class Slots:
    def __init__(
        self,
        model: GPT,
        planner: AttentionPlanner,
        eot: int,
        slots: int = 1,
        room: int = 0,
        weights: PackedWeights | None = None,
    ) -> None:
        """`room`: tokens of a text that are remembered; 0: as many as the model is made for."""
        self._model, self._planner, self._eot = model, planner, eot
        self.room = min(room or model.length, model.length)
        sizes = model.config
        cache = Cache(sizes.layers, slots, sizes.groups, self.room, sizes.size_of_head)
        self._decoder = decoder_for(model, cache, weights)
        matrices = [m.weight for m in model.modules() if isinstance(m, Linear)]
        weights_read = sum(x.numel() for x in matrices) or FEW_WEIGHTS
        self.few = min(max(FEW_WEIGHTS // weights_read, 1), FEW)
        self.follows_cache = follows_cache(model)
        self._caches = self._decoder.texts if self._decoder else [*map(cache.row, range(slots))]
        one_document = torch.zeros(1, self.room, dtype=torch.int32)
        self._first_T = planner.first_keys(one_document)[0].long()
        self._first: list[int] = self._first_T.tolist()
        self._ids: list[list[int]] = [[] for _ in range(slots)]  # all of a text
        self._from = [0] * slots  # the first of them in the cache
        self._start = [0] * slots  # of the last document, counted in the cache
        self.free = [*reversed(range(slots))]

    def take(self) -> int:
        """A slot for a new text."""
        slot = self.free.pop()
        self._ids[slot], self._from[slot], self._start[slot] = [], 0, 0
        self._caches[slot].clear()
        return slot

    def give_back(self, slot: int) -> None:
        assert slot not in self.free
        self.free.append(slot)

    @torch.inference_mode()
    def feed(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Logits]:
        """Logits (V,) after the last of each slot's tokens; good until the next call."""
        logits: dict[int, Logits] = {}
        few: dict[int, Sequence[int]] = {}
        for slot, ids in tokens.items():
            fits = self._caches[slot].length + len(ids) <= self.room
            one_by_one = self.can_write(slot, ids) > 0
            self._ids[slot] += ids
            if one_by_one:
                few[slot] = ids
            else:
                logits[slot] = self._read(slot, len(ids) if fits else self._forget(slot, len(ids)))
        for turn in range(max(map(len, few.values()), default=0)):
            found_SV = self._decode(
                {slot: ids[turn] for slot, ids in few.items() if turn < len(ids)}
            )
            logits |= {slot: found_SV[slot] for slot, ids in few.items() if turn == len(ids) - 1}
        return logits

    def _decode(self, tokens: Mapping[int, int]) -> Logits:
        """A token of each of some texts; gives the logits of all slots, (S, V)."""
        assert self._decoder is not None
        listed = []
        for slot, token in tokens.items():
            first = max(self._first[self._caches[slot].length], self._start[slot])
            listed.append((slot, token, first))
        found_SV: Logits = self._decoder(listed).numpy()
        return found_SV

    def can_write(self, slot: int, ids: Sequence[int]) -> int:
        """How many tokens can be drawn in one call after these; 0: they are not for this way."""
        few = len(ids) == 1 or len(ids) <= self.few
        if self._decoder is None or not few or self._opens(slot, ids):
            return 0
        return max(0, self.room - self._caches[slot].length - len(ids) + 1)

    @torch.inference_mode()
    def write(self, texts: Mapping[int, tuple[Sequence[int], Draws]]) -> dict[int, list[int]]:
        """Several tokens of each slot, after some that are fed; what is drawn last is not fed.

        The tokens are those that feeding and drawing them one by one would give.
        """
        assert self._decoder is not None
        asked = {slot: (ids, self._start[slot], how) for slot, (ids, how) in texts.items()}
        written = self._decoder.write(asked, self._first_T, self._eot)
        for slot, (ids, _) in texts.items():
            self._ids[slot] += [*ids, *written[slot][:-1]]
        return written

    def _opens(self, slot: int, ids: Sequence[int]) -> bool:
        """Whether a document begins among these tokens, and not with them a text.

        It hides what is before it, and the model knows how.
        """
        return self._eot in (ids if self._caches[slot].length else ids[1:])

    def sight(self, slot: int, fed: int) -> Sight:
        """What the last of the first `fed` tokens of a text saw."""
        ids, start = self._ids[slot], self._from[slot]
        documents = [start, *(i for i in range(start + 1, fed) if ids[i] == self._eot)]
        first = int(self._planner.first_keys(self._documents(slot))[0, fed - 1 - start])
        return Sight(start + first, start, tuple(documents))

    def _forget(self, slot: int, new: int) -> int:
        """Make room for `new` tokens: of the others at most half of the room is kept."""
        count = min(min(len(self._ids[slot]) - new, self.room // 2) + new, self.room)
        self._from[slot] = len(self._ids[slot]) - count
        self._caches[slot].clear()
        return count

    def _documents(self, slot: int) -> torch.Tensor:
        ids_BT = np.array([self._ids[slot][self._from[slot] :]], dtype=np.uint16)
        return torch.from_numpy(document_ids(ids_BT, self._eot))

    def _read(self, slot: int, count: int) -> Logits:
        """The last `count` tokens in one pass of the model."""
        documents_BT = self._documents(slot)
        if not self.follows_cache:
            self._caches[slot].clear()
            count = documents_BT.size(1)
        if count == documents_BT.size(1):
            plan = self._planner.plan(documents_BT)
        else:
            plan = self._planner.plan_last(documents_BT, count)
        if self._planner.inside_documents:
            begins = (documents_BT[0] == documents_BT[0, -1]).nonzero()[0]
            self._start[slot] = int(begins)
        ids_BT = torch.tensor([self._ids[slot][-count:]])
        cache = self._caches[slot]
        with telling(self._model.custom.values(), f"on a text of {documents_BT.size(1)} tokens"):
            if self.follows_cache:
                logits_BTV = self._model(ids_BT, plan, cache=cache)
            else:
                logits_BTV = self._model(ids_BT, plan)
                cache.advance(ids_BT)  # it only counts
        last: Logits = logits_BTV[0, -1, : self._model.vocab_size].float().numpy()
        return last
