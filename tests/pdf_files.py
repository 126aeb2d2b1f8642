"""PDF files for tests, written by hand."""

from __future__ import annotations


def pdf(*colours: str, size: tuple[float, float] = (90, 60), encrypted: bool = False) -> bytes:
    """A file with a page for each colour, such as `1 0 0`, in points of width and height."""
    kids = " ".join(f"{3 + 2 * n} 0 R" for n in range(len(colours)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(colours)} >>"]
    for n, colour in enumerate(colours):
        box = f"[0 0 {size[0]} {size[1]}]"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox {box} /Contents {4 + 2 * n} 0 R >>")
        drawn = f"{colour} rg 0 0 {size[0] / 2} {size[1]} re f"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    locked = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{'00' * 32}> /U <{'00' * 32}> /P -4 >> /ID [<00> <00>]"
    return assembled(*(text.encode() for text in objects), trailer=locked if encrypted else "")


def assembled(*objects: bytes, trailer: str = "") -> bytes:
    """A file of objects, of which the first is its catalogue, with more entries for its trailer."""
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer << /Root 1 0 R /Size {len(objects) + 1}"
    return data + f"{end} {trailer} >>\nstartxref\n{len(data)}\n%%EOF\n".encode()
