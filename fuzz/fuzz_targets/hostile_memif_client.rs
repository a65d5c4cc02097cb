//! A memif client that sends anything on the control channel, and writes anything into its own memory. Meanwhile a
//! node of the same VNI hands over frames with any offload header, and the serving worker is replaced. Two other
//! nodes exchange frames, each of which arrives once, whole and in order. The next client is served.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/memif"]
mod memif {
    pub mod client;
    pub mod port;
}
#[path = "../common/neighbours.rs"]
mod neighbours;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/net.rs"]
mod net;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use common::Choices;
use libfuzzer_sys::fuzz_target;
use rustix::fs::{FallocateFlags, SealFlags};
use tasuki_net::endpoint::memif::control::Terms;

use memif::client::{Channel, Client, Shape, add_region, add_ring, eventfd, init, memory, message};
use memif::port::{OTHER, PORT, SECRET, World, frame_to};
use neighbours::WITNESS;

struct Attack {
    world: World,
    /// The client after its handshake, with malicious intent.
    client: Option<Client>,
    /// The client's channel before its handshake.
    channel: Option<Channel>,
    /// Regions with and without seals, an eventfd, a pipe.
    props: [OwnedFd; 4],
    under_way: VecDeque<Vec<u8>>,
    now: Instant,
    /// Next step of an almost correct handshake.
    step: u8,
}

impl Attack {
    fn new() -> Self {
        let (_, pipe) = tasuki_shm::wake::bell_pipe().expect("a pipe");
        let props = [memory(1 << 16, SealFlags::SHRINK), memory(1 << 16, SealFlags::empty()), eventfd(), pipe];
        let (world, now) = (World::with(2, 64, Terms::new(0, SECRET, "fuzzed").expect("it is short")), Instant::now());
        Attack { world, client: None, channel: None, props, under_way: VecDeque::new(), now, step: 0 }
    }

    fn connect(&mut self, choices: &mut Choices<'_>) {
        self.leave();
        let shape = Shape { log2: choices.below(7), buffer: 16 + u32::from(choices.short()) % 4096 };
        let path = self.world.path();
        let world = &mut self.world;
        self.client = Some(Client::connect(&path, shape, SECRET, || {
            world.turn();
        }));
    }

    fn leave(&mut self) {
        (self.client, self.channel, self.step) = (None, None, 0);
        self.world.turn();
        assert!(self.world.node.endpoint.client().is_none(), "who has left is gone");
    }

    /// Sends a message, in its turn or not, with its proper descriptors or others.
    fn speak(&mut self, choices: &mut Choices<'_>) {
        if self.client.is_none() && self.channel.is_none() {
            self.channel = Some(Channel::connect(&self.world.path()));
        }
        // Mostly the next step.
        let step = self.step;
        self.step = (step + 1) % 5;
        let kind = match choices.below(16) {
            kind @ 0..8 => kind,
            _ => [0, 1, 8, 9, 6][usize::from(step)],
        };
        let mut bytes = match kind {
            8 | 9 => add_ring(kind == 8, 0, 0, u32::from(choices.below(4)) << 12, choices.below(8), 0),
            0 => init(0x0200, 0, 0, SECRET),
            1 | 2 => add_region(u16::from(choices.below(16) / 15), 1 << 16 | choices.word() >> 60),
            3 => add_region(choices.short(), choices.word()),
            4 | 5 => {
                let (offset, log2) = (u32::from(choices.short()) & 0xfff0, choices.below(10));
                add_ring(choices.below(2) == 0, 0, u16::from(choices.below(2)), offset, log2, 0)
            }
            6 => message(6, &[]),
            _ => (0..usize::from(choices.byte())).map(|_| choices.byte()).collect(),
        };
        if choices.below(8) == 0
            && let Some(byte) = bytes.get_mut(usize::from(choices.byte()))
        {
            *byte ^= choices.byte();
        }
        let with: Vec<_> = match choices.below(8) {
            0 => vec![],
            1..5 => vec![self.props[0].as_fd()],
            5..7 => vec![self.props[2].as_fd()],
            _ => (0..choices.below(5)).map(|i| self.props[usize::from(i % 4)].as_fd()).collect(),
        };
        // More often than not the proper descriptors.
        let with = match bytes.first() {
            Some(5) if !with.is_empty() => vec![self.props[2].as_fd()],
            Some(3 | 6) if with.len() == 1 => vec![],
            _ => with,
        };
        let channel = self.channel.as_ref().or(self.client.as_ref().map(|client| &client.channel));
        channel.expect("just seen").send(&bytes, &with);
    }

    /// Writes anything anywhere: into the connected client's memory, or into the memory it will hand over.
    fn scribble(&mut self, choices: &mut Choices<'_>) {
        let Some(client) = &mut self.client else {
            let bytes: Vec<u8> = (0..choices.below(64)).map(|_| choices.byte()).collect();
            let cookie = 0x03e3_1f20_u32.to_le_bytes();
            if choices.below(2) == 0 {
                // Possible places of a ring in an almost correct handshake.
                for place in 0..4 {
                    let _ = rustix::io::pwrite(&self.props[0], &cookie, place << 12);
                }
            } else {
                let _ = rustix::io::pwrite(&self.props[0], &bytes, u64::from(choices.short()) & 0xfff0);
            }
            return;
        };
        let to_server = choices.below(2) == 0;
        let ahead = u16::from(choices.below(6));
        match choices.below(8) {
            0 => client.set_head(to_server, choices.short()),
            1 | 2 => client.set_head(to_server, client.head(to_server).wrapping_add(ahead)),
            3 => client.set_flags(to_server, choices.short()),
            4 => {
                // A descriptor that the server reads next, with almost correct bounds.
                let (whole, buffer) = (u32::try_from(client.shape.len()).expect("it is small"), client.shape.buffer);
                let any = |word: u64| u32::try_from(word & 0xffff_ffff).expect("32 bits");
                let slot = u32::from(client.head(to_server).wrapping_add(ahead)) % client.shape.slots();
                let len =
                    [buffer, whole, any(choices.word()), u32::from(choices.short())][usize::from(choices.below(4))];
                let edge = whole.wrapping_sub(len).wrapping_add(u32::from(choices.below(3)));
                let place = client.shape.buffer_at(to_server, slot);
                let offset = [place, edge, any(choices.word()), 0][usize::from(choices.below(4))];
                let region = if choices.below(8) == 0 { choices.short() } else { 0 };
                client.describe(to_server, slot, choices.below(2).into(), region, len, offset);
                if to_server {
                    client.set_head(true, client.head(true).wrapping_add(ahead + 1));
                }
            }
            5 => {
                let at = u64::from(choices.short()) % client.shape.len();
                let at = u32::try_from(at).expect("it is small");
                if u64::from(at) + 4 <= client.shape.len() {
                    client.write(at, &choices.word().to_le_bytes()[..4]);
                }
            }
            6 => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = rustix::fs::fallocate(&client.memory, how, 0, u64::from(choices.short()) + 1);
            }
            _ => {
                let _ = rustix::io::write(&client.bells[usize::from(choices.below(2))], &choices.word().to_ne_bytes());
            }
        }
    }

    /// Checks the frames between the honest nodes. Frames from the client to the witness are not checked.
    fn look(&mut self) {
        neighbours::look(&mut self.world.net, &mut self.under_way);
    }
}

fuzz_target!(|input: &[u8]| {
    common::ignore_broken_pipes();
    let mut choices = Choices(input);
    let mut attack = Attack::new();
    let mut number = 0;
    while choices.are_left() && number < 300 {
        number += 1;
        match choices.below(15) {
            0 => attack.connect(&mut choices),
            1 | 2 => attack.speak(&mut choices),
            3..6 => attack.scribble(&mut choices),
            6 => {
                let frame = frame_to(OTHER, PORT, number, 14 + usize::from(choices.short()) % 3000);
                if let Some(client) = attack.client.as_mut().filter(|client| client.shape.buffer > 256) {
                    client.send(&frame);
                }
            }
            7 => neighbours::unfinished(&mut attack.world.net, &mut choices),
            8 => {
                attack.world.send(OTHER, &frame_to(PORT, OTHER, number, 14 + usize::from(choices.short()) % 5000));
            }
            9 => {
                let len = 18 + usize::from(choices.short()) % 3000;
                neighbours::send(&mut attack.world.net, &mut attack.under_way, WITNESS, number, len);
            }
            10 => attack.look(),
            11 => {
                attack.now += Duration::from_millis(200);
                let now = attack.now;
                attack.world.node.tick(now);
            }
            12 => {
                let _ = attack.world.node.arm();
                attack.world.turn();
            }
            13 => attack.world.succeed(choices.below(2) == 0),
            _ => {
                attack.world.turn();
            }
        }
    }
    attack.look();
    attack.look();
    assert!(attack.under_way.is_empty(), "a frame between honest nodes was lost");
    // The next client finds nothing of this one.
    attack.leave();
    attack.world.turn();
    attack.world.turn();
    attack.look();
    let path = attack.world.path();
    let world = &mut attack.world;
    let mut honest = Client::connect(&path, Shape { log2: 4, buffer: 2048 }, SECRET, || {
        world.turn();
    });
    assert!(honest.send(&frame_to(WITNESS, PORT, 7, 3000)));
    world.turn();
    assert!(world.at_other(WITNESS).contains(&frame_to(WITNESS, PORT, 7, 3000)));
    assert!(world.send(OTHER, &frame_to(PORT, OTHER, 8, 3000)));
    world.turn();
    assert_eq!(honest.receive(), [frame_to(PORT, OTHER, 8, 3000)]);
});
