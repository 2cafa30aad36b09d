"""Rules of operations that read records and texts: each by itself."""

from __future__ import annotations

from kdist.rows.node import Node, rule
from kdist.rows.values import Const, Rows, RowsMeet, Value, powers


@rule("ParseExampleV2")
def parse_examples(node: Node) -> Value:
    """Dense features of a known length: a row of each for each record.

    Those of any length are padded to the longest record's, sparse and ragged ones are numbered
    through all records: there rows meet.
    """
    if not node.constant:
        lengths = [node.out_shape(k)[1:] for k in range(len(node.op.outputs))]
        if node.attr("num_sparse") or node.attr("ragged_value_types") or None in sum(lengths, ()):
            raise RowsMeet
    return decode(node)


@rule("DecodeRaw", "DecodePaddedRaw", "DecodeCSV", "DecodeJSONExample")
def decode(node: Node) -> Value:
    """Each text by itself; numbers of one are a new dim behind the others."""
    if node.constant:
        return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
    node.only_constants(*range(1, len(node.values)))
    texts = node.values[0]
    if not isinstance(texts, Rows) or texts.power:
        raise RowsMeet
    return texts
