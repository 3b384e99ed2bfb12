"""A naive model of serial replay: the paper's policy read aloud, in exact fractions.

It scans everything, shares no code with the package, and is the reference for its results.
"""

from __future__ import annotations

from fractions import Fraction

PROBATIONARY, NORMAL, REUSE = range(3)
LABELS = ("probationary", "normal", "reuse")


class NaiveBlock:
    def __init__(self, group, contract, key, made_by, prefix):
        self.group, self.contract, self.key = group, contract, key
        self.made_by, self.prefix = made_by, prefix
        self.retention = PROBATIONARY
        self.age = 0  # position in native order: smaller is nearer to eviction


class NaiveReplay:
    def __init__(self, contracts, blocks, block_size, groups, policy="shield"):
        """contracts: name → (refill rate, burst), blocks per second and blocks."""
        self.contracts = {
            n: (Fraction(rate), Fraction(burst)) for n, (rate, burst) in contracts.items()
        }
        self.lowest_rate = min(rate for rate, _ in self.contracts.values())
        self.size, self.block_size, self.policy = blocks, block_size, policy
        self.history_limit = max(1, 4 * blocks // len(groups))
        self.history = {}  # group → identifiers, least recently admitted first
        self.buckets = {}  # (group, contract) → (balance, t0)
        self.resident = []  # in order of materialisation
        self.clock = 0
        self.events = []
        self.queried, self.hit, self.rejected = {}, {}, 0

    def balance(self, group, contract, t):
        rate, burst = self.contracts[contract]
        stored, t0 = self.buckets.get((group, contract), (burst, t))
        return min(burst, stored + rate * (t - t0))

    def deficits(self, group, t):
        """contract → blocks owed, for the contracts in debt."""
        owed = {c: -self.balance(g, c, t) for g, c in self.buckets if g == group}
        return {c: debt for c, debt in owed.items() if debt > 0}

    def weight(self, contract):
        return self.contracts[contract][0] / self.lowest_rate

    def victims(self, candidates, count, t):
        order = []
        candidates = list(candidates)
        groups = {b.group for b in candidates}
        p = {
            g: sum((d / self.weight(c) for c, d in self.deficits(g, t).items()), Fraction(0))
            for g in groups
        }
        for _ in range(count):
            choices = candidates
            if self.policy == "shield":
                owing = [b for b in candidates if p[b.group] > 0]
                if owing:
                    most = max(p[b.group] for b in owing)
                    choices = [b for b in owing if p[b.group] == most]
                victim = min(choices, key=lambda b: (b.retention, b.age))
                if owing:
                    step = 1 / max(self.weight(c) for c in self.deficits(victim.group, t))
                    p[victim.group] = max(Fraction(0), p[victim.group] - step)
            else:
                victim = min(choices, key=lambda b: b.age)
            candidates.remove(victim)
            order.append(victim)
        return order

    def serve(self, t_ms, tokens, ids, group, contract, prefix, name):
        if len(ids) > self.size:
            self.rejected += 1
            return
        t = Fraction(t_ms) / 1000
        hits = []
        for key in ids[: (tokens - 1) // self.block_size]:
            found = [b for b in self.resident if (b.group, b.key) == (group, key)]
            if not found:
                break
            hits.append(found[0])
        self.queried[group] = self.queried.get(group, 0) + len(ids)
        self.hit[group] = self.hit.get(group, 0) + len(hits)

        if self.policy == "shield" and not self.deficits(group, t):
            for b in hits:
                same = (b.group, b.contract, b.prefix) == (group, contract, prefix or b.key)
                if same and b.made_by != name and b.retention != REUSE:
                    b.retention = REUSE
                    self.log(t, "promote", b, group)

        new = ids[len(hits) :]
        others = [b for b in self.resident if b not in hits]
        for b in self.victims(others, max(0, len(new) - (self.size - len(self.resident))), t):
            self.resident.remove(b)
            self.log(t, "evict", b, group)

        if new:
            self.buckets[group, contract] = (self.balance(group, contract, t) - len(new), t)
        funded = self.balance(group, contract, t) >= 0
        made = []
        for key in new:
            b = NaiveBlock(group, contract, key, name, prefix or key)
            known = self.admitted_before(group, prefix or key, name)
            b.retention = NORMAL if known and funded else PROBATIONARY
            self.resident.append(b)
            made.append(b)
            self.log(t, "admit", b, group)
        for b in reversed(hits + made):
            self.clock += 1
            b.age = self.clock

    def admitted_before(self, group, identifier, name):
        entries = self.history.setdefault(group, [])
        known = [entry for entry in entries if entry[0] == identifier]
        first = known[0][1] if known else name
        entries[:] = [e for e in entries if e[0] != identifier] + [(identifier, first)]
        del entries[: max(0, len(entries) - self.history_limit)]
        return first != name

    def log(self, t, event, b, by):
        label = LABELS[b.retention] if self.policy == "shield" else None
        self.events.append((float(t), event, b.group, b.key, label, by))


class NaiveS3Fifo:
    """S3-FIFO of the paper (SOSP 2023) with lists, over blocks of which some are held."""

    def __init__(self, capacity):
        self.small_size = capacity // 10
        self.main_size = capacity - self.small_size
        self.small, self.main, self.ghost = [], [], []
        self.hits, self.key = {}, {}
        self.full = False  # whether anything was ever evicted

    def materialise(self, blocks, keys):
        for block, key in zip(blocks, keys, strict=True):
            self.key[block], self.hits[block] = key, 0
            if key in self.ghost:
                self.ghost.remove(key)
                self.main.append(block)
            elif not self.full and len(self.small) >= self.small_size:
                self.main.append(block)
            else:
                self.small.append(block)

    def hit(self, blocks):
        for block in blocks:
            self.hits[block] = min(3, self.hits[block] + 1)

    def evict(self, count, candidates):
        self.full |= count > 0
        candidates = set(candidates)
        victims = []
        while len(victims) < count:
            small = [b for b in self.small if b in candidates]
            main = [b for b in self.main if b in candidates]
            if small and (len(self.main) <= self.main_size or not main):
                block = small[0]
                self.small.remove(block)
                if self.hits[block] >= 2:
                    self.main.append(block)
                    continue
                self.ghost = [k for k in self.ghost if k != self.key[block]] + [self.key[block]]
                self.ghost = self.ghost[-self.main_size :]
            else:
                block = main[0]
                self.main.remove(block)
                if self.hits[block] > 0:
                    self.hits[block] -= 1
                    self.main.append(block)
                    continue
            victims.append(block)
            candidates.remove(block)
        return victims

    def forget(self, block):
        for queue in (self.small, self.main):
            if block in queue:
                queue.remove(block)


class NaiveOrder:
    """The default preset's order of reclamation with lists; debts are given, not kept."""

    def __init__(self, capacity, scale=1, as_old=Fraction(3, 100), rounds=8192):
        """scale: victims that one block of debt pays for; rounds: of one call of ``take``."""
        self.capacity, self.scale, self.as_old = capacity, Fraction(scale), as_old * capacity
        self.group, self.retention, self.chances = {}, {}, {}  # of every cached block
        self.place = {}  # of every candidate: how many were released before it
        self.released = 0
        self.rounds, self.left = rounds, 0
        self.early = round(Fraction(capacity, 10))  # unproven ones to take before it is first full

    @property
    def waiting(self):
        """Candidates, the one released first in front."""
        return sorted(self.place, key=self.place.__getitem__)

    def admit(self, block, group, proven):
        if not proven and self.early is not None:
            self.early -= 1
            proven = self.early < 0
        self.group[block], self.chances[block] = group, 0
        self.retention[block] = NORMAL if proven else PROBATIONARY

    def reuse(self, block, promote):
        self.chances[block] = min(3, self.chances[block] + 1)
        self.retention[block] = max(self.retention[block], REUSE if promote else NORMAL)

    def release(self, blocks):
        for block in blocks:
            self.place[block] = self.released
            self.released += 1

    def hold(self, blocks):
        for block in blocks:
            self.place.pop(block, None)

    def drop(self, block):
        self.hold([block])
        del self.group[block], self.retention[block], self.chances[block]

    def take(self, count, rule, debts, weights):
        """debts: what every group with an account owes, normalised."""
        share, calls = rule
        self.left = self.rounds
        if count:
            self.early = None
        p = dict(debts)
        floor = sum(p.values()) / len(p) if p else 0
        victims = []
        for _ in range(count):
            owing = [b for b in self.waiting if p.get(self.group[b], 0) > floor + 1e-6]
            payer = None
            if owing:
                most = max(p[self.group[b]] for b in owing)
                tied = [b for b in owing if p[self.group[b]] > most - 1e-6]
                payer = self.group[min(tied, key=lambda b: self.retention[b])]
            if payer is not None and calls:
                victim = self.next(share, payer)
            else:
                victim = self.next(share)
                if payer is not None:
                    victim = self.about_as_old(victim, payer, share)
            if self.group[victim] == payer:
                p[payer] -= 1 / (weights[payer] * self.scale)
            victims.append((victim, self.retention[victim]))
            self.drop(victim)
        return victims

    def segments(self, group=None):
        """Unproven and proven candidates, each in the order in which they go."""
        mine = [b for b in self.waiting if group in (None, self.group[b])]
        unproven = [b for b in mine if self.retention[b] == PROBATIONARY]
        proven = [b for b in mine if self.retention[b] != PROBATIONARY]
        if group is not None:  # of its own, what was promoted goes last
            proven.sort(key=self.retention.__getitem__)
        return unproven, proven

    def next(self, share, group=None):
        """The next victim, of a group that pays or of all; second chances are used up."""
        while True:
            unproven, proven = self.segments(group)
            over = sum(r != PROBATIONARY for r in self.retention.values()) > share * self.capacity
            if not (unproven and proven):
                victim = (unproven or proven)[0]
            elif not share:
                victim = min(unproven[0], proven[0], key=self.place.__getitem__)
            else:
                victim = proven[0] if over else unproven[0]
            if not self.has_a_chance(victim, share):
                return victim
            self.chances[victim] -= 1
            self.left -= 1
            self.release([victim])

    def has_a_chance(self, block, share):
        return self.left and share and self.retention[block] != PROBATIONARY and self.chances[block]

    def about_as_old(self, victim, group, share):
        """The block of the same segment that a group would lose instead, else the victim."""
        unproven, proven = self.segments(group)
        own = (unproven if self.retention[victim] == PROBATIONARY else proven)[:1]
        for block in own:
            if self.place[block] <= self.place[victim] + self.as_old:
                return victim if self.has_a_chance(block, share) else block
        return victim
