"""That the check of machine code finds operands of wgmma that are no addresses."""

import pytest

from tests.sagebwd.kernels.triton.wgmma_addresses import parse, wrong_addresses_of

#: As nvdisasm prints it: an address, cut to 14 bits, and the next slice of the operand. B alone is in memory.
RIGHT = """
        /*0100*/                   USHF.R.U32.HI UR7, URZ, 0x4, UR12 ;
        /*0110*/                   USGXT.U32 UR14, UR7, 0xe ;
        /*0118*/              @!P1 LDG.E R8, desc[UR8][R10.64] ;
        /*0120*/                   R2UR UR4, R8 ;
        /*0130*/                   UIADD3 UR6, UP0, UR14, 0x40, URZ ;
        /*0140*/                   UIADD3.X UR7, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
.L_x_1:
        /*0150*/                   FMUL R172, R148, UR4 ;
        /*0160*/                   UMOV UR46, UR14 ;
        /*0170*/                   HGMMA.64x32x16.F32 R104, R24, gdesc[UR44].tnspB, R104 ;
        /*0180*/                   HGMMA.64x32x16.F32 R104, R28, gdesc[UR4].tnspB, R104, gsb0 ;
        /*0190*/               @P0 BRA `(.L_x_1) ;
"""


def test_addresses_are_followed_through_moves_and_additions():
    assert not wrong_addresses_of(parse(RIGHT))


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        # What ptxas 12.8 made: the offset is added to a number that is multiplied by.
        ("UP0, UR14, 0x40", "UP0, UR4, 0x40", "0180: UR6 is from LDG.E R8, desc[UR8][R10.64]"),
        ("UMOV UR46, UR14", "ULEA UR46, UR4, UR5, 0x18", "0170: UR46 is from ULEA UR46, UR4, UR5, 0x18"),
        ("UMOV UR46, UR14", "UMOV UR45, UR14", "0170: UR46 is from nothing that was written"),
    ],
)
def test_other_values_are_found(right, wrong, found):
    assert wrong_addresses_of(parse(RIGHT.replace(right, wrong))) == [found]


def test_both_operands_in_shared_memory():
    text = RIGHT + "        /*0200*/   IGMMA.64x128x32.S8.S8 R24, gdesc[UR44], RZ, !UPT, gsb0 ;"
    assert wrong_addresses_of(parse(text)) == ["0200: UR44 is from nothing that was written"]
