"""Into how many chunks the keys of decode rows are cut, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the compiled kernel plans for attention on a GPU", allow_module_level=True)
pytest.importorskip("triton")

from nvcli.kernels.triton.decode_work_list import DecodeWorkList

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter


@pytest.mark.parametrize(("num_rows", "lone_warps_above", "chunks"), [(33, None, 1), (33, 32, 2), (32, 32, 1)])
def test_rows_for_single_warps_are_cut_into_more_chunks(
    num_rows: int, lone_warps_above: int | None, chunks: int
) -> None:
    work_list = DecodeWorkList(
        window=None,
        num_kv_heads=1,
        tile=64,
        align=64,
        max_rows=33,
        device=torch.device("cpu"),
        lone_warps_above=lone_warps_above,
    )
    work_list.plan(torch.full((num_rows,), 1000, dtype=torch.int32), torch.arange(num_rows))
    assert work_list.num_items.item() == chunks * num_rows <= work_list.capacity(num_rows)
    rows, begins, ends = work_list.items[: chunks * num_rows, :3].T
    assert rows.bincount().tolist() == [chunks] * num_rows
    assert (ends - begins).sum() == 1000 * num_rows
    assert work_list.max_partials >= (chunks * num_rows if chunks > 1 else 0)
