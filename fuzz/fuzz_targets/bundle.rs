//! A worker reads any text of a device bundle, with descriptors of every kind beside it.
//!
//! What must hold: no panic; an impossible device bundle is refused before anything is asked of the device.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use common::Choices;
use libfuzzer_sys::fuzz_target;
use tasuki_net::nic::bundle::{Fds, Text, unpack};
use tasuki_net::nic::bus::VfioUser;
use tasuki_shm::region::{Pages, Region};

/// Device bundle of a card as our model serves it.
const HONEST: &str = r#"{"bus":{"way":"vfio-user","fds_max":8,"transfer_max":4096,"io_fds":true,"config_len":256,"can_reset":true,
    "bars":[{"index":0,"len":131072,"places":[[10264,0],[14360,8]]}],"vectors":1},
    "memory":{"rings_at":4294967296,"rings_len":65536,"slot_len":2048,"slots":64}}"#;

fn descriptor(choices: &mut Choices<'_>) -> OwnedFd {
    let memory = |len| Region::create("fuzz", len, Pages::Small).expect("memory").into_fd();
    match choices.below(6) {
        0 => memory(4096),
        1 => memory(65536),
        2 => memory(64 * 2048),
        3 => memory(40 * 1024),
        4 => rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd"),
        _ => UnixStream::pair().expect("a pair").0.into(),
    }
}

fuzz_target!(|data: &[u8]| {
    common::ignore_broken_pipes();
    let mut choices = Choices(data);
    let count = choices.below(9);
    // The descriptors of an honest device bundle in its order, or any.
    let fds: Vec<OwnedFd> = if choices.below(2) == 0 {
        let mut of = |kind: u8| descriptor(&mut Choices(&[kind]));
        [5, 0, 0, 4, 1, 2, 3].map(&mut of).into_iter().take(count.into()).collect()
    } else {
        (0..count).map(|_| descriptor(&mut choices)).collect()
    };
    let text = if choices.below(2) == 0 {
        String::from_utf8_lossy(choices.0).into_owned()
    } else {
        // The honest text with some of its digits changed.
        let mut text = HONEST.as_bytes().to_vec();
        for _ in 0..choices.below(8) {
            let at = usize::from(choices.short()) % text.len();
            if text[at].is_ascii_digit() {
                text[at] = b'0' + choices.below(10);
            }
        }
        String::from_utf8(text).expect("it was text")
    };
    let Ok(text) = serde_json::from_str::<Text>(&text) else { return };
    let _ = unpack::<VfioUser>(&text, Fds::new(fds)).is_ok();
});
