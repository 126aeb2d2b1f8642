"""PDF files that have much of what the format allows."""

from __future__ import annotations

import io
import zlib

from hostile_images import encoded, picture
from pdf_files import assembled

_TEXT = "BT /F 12 Tf 10 40 Td (Hello) Tj 0 -14 Td [(W) 120 (orld)] TJ ET"
_PAINT = "/Pattern cs /P scn 5 5 30 30 re f /S sh 0.5 w 10 10 m 20 50 60 0 80 50 c S"
_FUNCTION = "<< /FunctionType 2 /Domain [0 1] /C0 [1 0 0] /C1 [0 0 1] /N 1 >>"
_PAGE = (
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 90 60] /Rotate 90 /Contents {contents} 0 R /Annots [7 0 R] "
    "/Group << /S /Transparency /CS /DeviceRGB >> /Resources << "
    "/Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica /FirstChar 32 /LastChar 34 /Widths [1 2 3] >> >> "
    "/Pattern << /P 6 0 R >> /Shading << /S << /ShadingType {shading} /ColorSpace /DeviceRGB /Coords [{coords}] "
    f"/Function {_FUNCTION} /Extend [true true] >> >> /XObject << /X 8 0 R >> "
    "/ExtGState << /G << /ca 0.5 /BM /Multiply >> >> >> >>"
)


def _stream(entries: str, data: bytes) -> bytes:
    return f"<< {entries} /Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream"


def _drawing(*, is_packed: bool) -> bytes:
    """Two pages with texts, curves, patterns, shadings, transparency, a form and annotations."""
    pack, entry = (zlib.compress, "/Filter /FlateDecode") if is_packed else (bytes, "")
    tile = "/Type /Pattern /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 4 4] /XStep 5 /YStep 5 /Resources << >>"
    field = (
        "<< /Type /Annot /Subtype /Widget /FT /Tx /T (a) /V (text) /DA (/F 9 Tf 0 g) /Rect [40 30 80 50] /F 4 "
        "/MK << /BG [1 1 0] >> >>"
    )
    form = "/Type /XObject /Subtype /Form /BBox [0 0 90 60] /Matrix [0.5 0 0 0.5 0 0]"
    return assembled(
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [7 0 R] /NeedAppearances true >> >>",
        b"<< /Type /Pages /Kids [3 0 R 4 0 R] /Count 2 >>",
        _PAGE.format(contents=5, shading=2, coords="0 0 90 60").encode(),
        _PAGE.format(contents=8, shading=3, coords="45 30 0 45 30 40").encode(),
        _stream(entry, pack(f"q /G gs {_PAINT} Q {_TEXT} q 40 0 0 40 0 0 cm /X Do Q".encode())),
        _stream(f"{tile} {entry}", pack(b"1 0 0 rg 0 0 2 2 re f")),
        field.encode(),
        _stream(f"{form} {entry}", pack(f"{_TEXT} 0 0 1 RG 5 w 0 0 90 60 re S".encode())),
    )


def _figure(font_type: int) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with rc_context({"pdf.fonttype": font_type, "pdf.compression": 0}):
        figure = Figure(figsize=(1.5, 1))
        axes = figure.subplots()
        axes.plot([1, 3, 2], label="α")
        axes.imshow([[0, 1], [2, 3]], extent=(0, 1, 1, 2))
        axes.legend()
        figure.savefig(out, format="pdf")
    return out.getvalue()


def valid_pdfs() -> dict[str, bytes]:
    """Files by what is special about them."""
    found = {f"image {mode}": encoded(picture(mode), "PDF") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")}
    others = [picture(seed=seed) for seed in (1, 2)]
    return found | {
        "images": encoded(picture(), "PDF", save_all=True, append_images=others),
        "drawing": _drawing(is_packed=False),
        "packed drawing": _drawing(is_packed=True),
        "fonts of outlines": _figure(3),
        "TrueType fonts": _figure(42),
    }
