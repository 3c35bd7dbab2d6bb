"""Tables in which every two values of two factors meet, as far as both can be in one row at all: few rows find what
only shows when two things come together. Made greedily and without chance, so the same factors give the same table."""

from collections import Counter
from itertools import combinations, product


def table(factors, goes):
    """Rows (dicts) that cover every pair of values which some row can have. factors: {name: values}, values that are
    cheap first: where it does not matter they are taken. goes(row): whether a row that has some of the factors makes
    sense so far; what it refuses it must refuse of every longer row, too."""
    rows = []
    missing = [pair for pair in _pairs(factors) if _complete(dict(pair), factors, goes, set())]
    uncovered = dict.fromkeys(missing)
    while uncovered:
        row = _complete(dict(next(iter(uncovered))), factors, goes, uncovered)
        rows.append(row)
        for pair in pairs_of(row):
            uncovered.pop(pair, None)
    return _without_needless(rows)


def _without_needless(rows):
    """Without those whose pairs are all in others: the first rows were made when every pair was new."""
    count = Counter(pair for row in rows for pair in pairs_of(row))
    left = []
    for row in rows:
        if all(count[pair] > 1 for pair in pairs_of(row)):
            count.subtract(pairs_of(row))
        else:
            left.append(row)
    return left


def pairs_of(row):
    """The pairs of a whole row, each in the order of the row's factors."""
    return set(combinations(row.items(), 2))


def possible_pairs(factors, goes):
    """The same pairs by trying every row that there is, which takes long where factors are many: what table() is held
    against."""
    pairs = set()
    for values in product(*factors.values()):
        row = dict(zip(factors, values))
        if goes(row):
            pairs |= pairs_of(row)
    return pairs


def _pairs(factors):
    for (one, values), (other, others) in combinations(factors.items(), 2):
        for pair in product(values, others):
            yield (one, pair[0]), (other, pair[1])


def _complete(row, factors, goes, uncovered):
    """The row with a value for every factor, each that which covers most of the uncovered pairs; None: there is no
    such row. (Backtracks, over all values at worst.)"""
    if not goes(row):
        return None
    left = [name for name in factors if name not in row]
    if not left:
        return {name: row[name] for name in factors}
    name, order = left[0], list(factors)

    def gain(value):
        mine = (name, value)
        return sum(((item, mine) if order.index(item[0]) < order.index(name) else (mine, item)) in uncovered
                   for item in row.items())
    for value in sorted(factors[name], key=gain, reverse=True):  # stable: cheap ones first among equals
        if whole := _complete({**row, name: value}, factors, goes, uncovered):
            return whole
    return None
