"""A row of a product is the same, bit for bit, however many rows are beside it."""

from __future__ import annotations

import pytest
import torch

from skipdecode.engine.kernels import backend_for
from skipdecode.engine.kernels.spec import LinearSpec


@pytest.mark.parametrize("columns", [96, 1536])
def test_rows_do_not_depend_on_their_number(columns):
    backend, hint = backend_for(torch.device("cpu"), torch.bfloat16, "auto")
    if backend.name != "native":
        pytest.skip(f"no C++ kernels here: {hint}")
    torch.manual_seed(0)
    call = backend.linear(LinearSpec(torch.randn(96, columns).bfloat16(), None, "none"))
    x = torch.randn(130, columns)
    alone = torch.empty(130, 96)
    for row in range(130):
        call(x[row : row + 1], alone[row : row + 1], 1, False)
    for rows in range(1, 131):
        out = torch.empty(rows, 96)
        call(x, out, rows, False)
        assert torch.equal(out, alone[:rows]), f"{rows} rows"
