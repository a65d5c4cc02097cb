//! A vfio-user server that answers anything: every field, every length, with and without descriptors, cut off
//! anywhere.
//!
//! What must hold: the client does not panic, hang or map memory that could be taken away; it believes nothing after
//! a breach.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::time::Duration;

use common::{Choices, say};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use tasuki_net::nic::bus::{Bus, Header, Iova, Registers, VfioUser};
use tasuki_shm::region::{Pages, Region};

/// Requests of the client, in order, if all goes well: command, and length of the right answer.
const QUESTIONS: [(u16, usize); 16] = [
    (1, 4),
    (4, 16),
    (5, 32),
    (9, 20),
    (9, 20),
    (9, 20),
    (9, 20),
    (5, 80),
    (9, 20),
    (10, 16),
    (9, 20),
    (7, 16),
    (8, 0),
    (2, 0),
    (3, 24),
    (13, 0),
];

/// Makes an answer that is right in most fields, or in none.
fn answer(choices: &mut Choices<'_>, number: u16, (command, len): (u16, usize)) -> Vec<u8> {
    let wrong = choices.byte();
    let id = if wrong & 0xf0 == 0x10 { choices.short() } else { number };
    let command = if wrong & 0xf0 == 0x20 { choices.short() } else { command };
    let len = if wrong & 0xf0 == 0x30 { choices.short().into() } else { len };
    let flags = if wrong & 0xf0 == 0x40 { choices.word() as u32 } else { 1 };
    let size = if wrong & 0xf0 == 0x50 { choices.word() as u32 } else { (16 + len) as u32 };
    let mut bytes = [id.to_ne_bytes(), command.to_ne_bytes()].concat();
    [size, flags, choices.byte().into()].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    let body: Vec<u8> = match (wrong & 0xf0 == 0x60, command) {
        (false, 1) => [0_u16, 1].iter().flat_map(|word| word.to_ne_bytes()).collect(),
        (false, 4) => [16_u32, 3, 9, 5].iter().flat_map(|word| word.to_ne_bytes()).collect(),
        (false, 7) => [16_u32, 1, 2, 20].iter().flat_map(|word| word.to_ne_bytes()).collect(),
        _ => choices.bytes(len).to_vec(),
    };
    bytes.extend(body);
    bytes.resize(16 + len, 0);
    bytes
}

fuzz_target!(|data: &[u8]| {
    common::ignore_broken_pipes();
    let mut choices = Choices(data);
    let (server, client) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .expect("a socket pair");
    let memory = Region::create("fuzz", 16384, Pages::Small).expect("memory");
    let fds = vec![memory.fd(); choices.below(20).into()];
    let with_fds = choices.below(20);
    for (number, &question) in (1_u16..).zip(&QUESTIONS) {
        let bytes = answer(&mut choices, number, question);
        let here = number == u16::from(with_fds);
        say(&server, &bytes, if here { &fds } else { &[] });
    }
    // Then the rest of the input, as it is.
    say(&server, choices.0, &[]);
    rustix::net::shutdown(&server, Shutdown::Write).expect("a socket");

    let Ok(mut bus) = VfioUser::meet(client, Duration::from_secs(10)) else { return };
    let _ = Header::read(&mut bus);
    if let Ok(registers) = bus.registers(0) {
        registers.write32(0x10, 1);
        for offset in [0, 4092, 4096, 0xffff_fffc] {
            let _ = registers.read32(offset);
            registers.write8(offset, 1);
        }
    }
    let _ = bus.interrupts(3);
    let _ = bus.map_dma(&memory, Iova(0));
    let _ = bus.unmap_dma(Iova(0), 16384);
    let _ = bus.reset();
    // The server has sent everything. In the end it is gone, or has broken a rule.
    while bus.read_config(0).is_ok() {}
});
