//! Any bytes where daemon and worker read packets, messages, and driver states.
//!
//! What must hold: no panic; a parsed value is the same when it is written again and read; a driver state has the
//! checksum that it claims.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tasuki_relay::Tenure;
use tasuki_relay::driver_state::DriverState;
use tasuki_relay::message::{self, ToDaemon, ToWorker};
use tasuki_relay::wire::{Order, Plan, Report};

fn packet(bytes: &[u8]) {
    if let Ok(order) = Order::parse(bytes) {
        assert_eq!(order.to_bytes(), bytes, "{order:?}");
    }
    if let Ok(report) = Report::parse(bytes) {
        assert_eq!(report.to_bytes(), bytes, "{report:?}");
        let _ = format!("{report:?}");
    }
    if let Ok(plan) = Plan::parse(bytes) {
        assert_eq!(plan.to_bytes(), bytes, "{plan:?}");
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 5 {
        0 => packet(bytes),
        // A packet that gets past the head.
        1 => {
            let mut whole = [b"TRL\0".as_slice(), &1_u16.to_le_bytes(), bytes].concat();
            whole.resize(32, 0);
            packet(&whole);
            if let Some((nic, inner)) =
                message::unframe(&message::frame(7, whole.as_slice().try_into().expect("32 bytes")))
            {
                assert_eq!((nic, inner), (7, &whole[..]));
            }
        }
        2 => {
            if let Ok(message) = serde_json::from_slice::<ToWorker>(bytes) {
                let text = serde_json::to_vec(&message).expect("plain data");
                assert_eq!(serde_json::from_slice::<ToWorker>(&text).expect("our own"), message);
            }
            if let Ok(message) = serde_json::from_slice::<ToDaemon>(bytes) {
                let text = serde_json::to_vec(&message).expect("plain data");
                assert_eq!(serde_json::from_slice::<ToDaemon>(&text).expect("our own"), message);
            }
        }
        3 => {
            if let Ok(driver_state) = DriverState::read(bytes) {
                let mut again = vec![0; bytes.len()];
                let len = driver_state.write(&mut again).expect("it was there");
                assert_eq!(again[..len], bytes[..len]);
            }
            if let Some(word) = bytes.first_chunk::<8>() {
                let tenure = Tenure::from_word(u64::from_le_bytes(*word));
                assert_eq!(Tenure::from_word(tenure.to_word()), tenure);
            }
        }
        // A driver state of ours with one place changed.
        _ => {
            let Some((&[at, with], rest)) = bytes.split_first_chunk::<2>() else { return };
            let driver_state = DriverState { kind: 1, version: 2, epoch: 3, bytes: rest };
            let mut memory = vec![0; rest.len() + 64];
            let len = driver_state.write(&mut memory).expect("there is room");
            memory[usize::from(at) % len] ^= with;
            match DriverState::read(&memory) {
                Ok(read) => assert!(with == 0 && read == driver_state, "a change that nobody saw"),
                Err(_) => assert!(with != 0),
            }
        }
    }
});
