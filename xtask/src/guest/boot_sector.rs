//! A disk that the firmware boots: proves that SeaBIOS, which sets up vring 0 only and polls without
//! interrupts, reads through the daemon.

/// Text of the second sector, which the first prints when the BIOS has read it.
pub(crate) const GREETING: &str = "CLEAVE second sector read by the BIOS";

/// 16-bit code: read sector 2 with INT 13h, print it on the serial port, halt.
#[rustfmt::skip]
const CODE: &[u8] = &[
    0x31, 0xC0, 0x8E, 0xD8, 0x8E, 0xC0, 0x8E, 0xD0, // xor ax, ax; mov ds, ax; mov es, ax; mov ss, ax
    0xBC, 0x00, 0x7C, // mov sp, 0x7C00
    0xB8, 0x01, 0x02, // mov ax, 0x0201: read one sector
    0xB9, 0x02, 0x00, 0xB6, 0x00, // mov cx, 2; mov dh, 0: cylinder 0, sector 2, head 0, drive as given in dl
    0xBB, 0x00, 0x7E, // mov bx, 0x7E00: to there
    0xCD, 0x13, 0x72, 0x0E, // int 0x13; jc halt
    0xBE, 0x00, 0x7E, 0xBA, 0xF8, 0x03, // mov si, 0x7E00; mov dx, 0x3F8
    0xAC, 0x84, 0xC0, 0x74, 0x03, // print: lodsb; test al, al; jz halt
    0xEE, 0xEB, 0xF8, // out dx, al; jmp print
    0xF4, 0xEB, 0xFD, // halt: hlt; jmp halt
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
