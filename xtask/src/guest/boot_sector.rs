//! A disk that the firmware boots: proves that SeaBIOS, which sets up vring 0 only and polls without
//! interrupts, reads through the daemon.

/// What the second sector says when the first has read it through the BIOS.
pub(crate) const GREETING: &str = "CLEAVE second sector read by the BIOS";

/// 16-bit code: read sector 2 with INT 13h, print it on the serial port, halt.
const CODE: &[u8] = &[
    0x31, 0xC0, // xor ax, ax
    0x8E, 0xD8, // mov ds, ax
    0x8E, 0xC0, // mov es, ax
    0x8E, 0xD0, // mov ss, ax
    0xBC, 0x00, 0x7C, // mov sp, 0x7C00
    0xB8, 0x01, 0x02, // mov ax, 0x0201: read one sector
    0xB9, 0x02, 0x00, // mov cx, 0x0002: cylinder 0, sector 2
    0xB6, 0x00, // mov dh, 0: head 0, drive as given in dl
    0xBB, 0x00, 0x7E, // mov bx, 0x7E00: to there
    0xCD, 0x13, // int 0x13
    0x72, 0x0E, // jc halt
    0xBE, 0x00, 0x7E, // mov si, 0x7E00
    0xBA, 0xF8, 0x03, // mov dx, 0x3F8
    0xAC, // print: lodsb
    0x84, 0xC0, // test al, al
    0x74, 0x03, // jz halt
    0xEE, // out dx, al
    0xEB, 0xF8, // jmp print
    0xF4, // halt: hlt
    0xEB, 0xFD, // jmp halt
];

/// The first sectors of such a disk, to a length in bytes.
pub(crate) fn image(bytes: usize) -> Vec<u8> {
    let mut image = vec![0; bytes.max(1024)];
    image[..CODE.len()].copy_from_slice(CODE);
    image[510..512].copy_from_slice(&[0x55, 0xAA]);
    let greeting = format!("{GREETING}\r\n");
    image[512..512 + greeting.len()].copy_from_slice(greeting.as_bytes());
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_land_where_the_comments_say() {
        let halt = CODE.len() - 3;
        let print = CODE.len() - 11;
        assert_eq!((CODE[halt], CODE[print]), (0xF4, 0xAC));
        let target =
            |at: usize| (at + 2).wrapping_add_signed(isize::from(CODE[at + 1].cast_signed()));
        let jumps: Vec<(usize, usize)> = [0x72, 0x74]
            .into_iter()
            .filter_map(|code| CODE.iter().position(|byte| *byte == code))
            .map(|at| (at, target(at)))
            .collect();
        assert_eq!(
            jumps.iter().map(|jump| jump.1).collect::<Vec<_>>(),
            [halt, halt]
        );
        assert_eq!(target(halt - 2), print);
        assert_eq!(target(halt + 1), halt);
    }

    #[test]
    fn the_firmware_finds_its_signature() {
        let image = image(4096);
        assert_eq!(&image[510..512], &[0x55, 0xAA]);
        assert_eq!(image.len(), 4096);
    }
}
