//! The driver of virtio network devices on QEMU's model with two pairs of queues, where frames come to either. Its
//! wire is a TAP with two queues.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Output;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};
use smoltcp::phy::{Medium, RawSocket};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{How, Mac, NicMemory};

use crate::conformance::in_place::Twinned;
use crate::conformance::repoint::Repointed;
use crate::conformance::{Sender, World};
use crate::place::{Place, is_possible};
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};
use crate::wait::readable;
use crate::{suite, suite_in_place, suite_repoint};
use tasuki_testing::polled;

/// Number of queues of the TAP, and of queue pairs of the device.
const QUEUES: u8 = 2;
/// Longest payload that the kernel's side sends: longer than the device's, which must refuse the excess.
const MTU: &str = "16000";
/// Bytes for frames that came and were not read yet.
const ROOM: usize = 32 << 20;
/// Longest frame that any model sends, in bytes.
const FRAME_MAX: usize = 65_536;

/// The kernel's side of the TAP.
#[derive(Debug)]
struct Kernel(OwnedFd);

impl Kernel {
    /// Makes the TAP, on which only this test sends. The kernel refuses frames without room, instead of queueing and
    /// dropping them.
    fn new(place: &Place) -> Self {
        let ip = |words: &str| {
            let done = place.ip(&words.split(' ').collect::<Vec<_>>());
            assert!(done, "ip {words}");
        };
        let run = |program: &str, words: &str| {
            let done = place.command(program).args(words.split(' ')).status();
            assert!(done.is_ok_and(|status| status.success()), "{program} {words}");
        };
        ip("tuntap add dev nic0 mode tap multi_queue vnet_hdr");
        run("sysctl", "-q net.ipv6.conf.nic0.disable_ipv6=1");
        run("tc", "qdisc replace dev nic0 root noqueue");
        ip(&format!("link set nic0 mtu {MTU} up"));
        let socket = place.within(|| {
            let socket = RawSocket::new("nic0", Medium::Ethernet)?;
            let us = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
            // The same socket, by a descriptor that can be borrowed.
            Ok(rustix::process::pidfd_getfd(us, socket.as_raw_fd(), PidfdGetfdFlags::empty())?)
        });
        let socket = socket.expect("root has sockets for frames");
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, ROOM).expect("root has as much as it likes");
        Kernel(socket)
    }

    fn try_clone(&self) -> Self {
        Kernel(self.0.try_clone().expect("a descriptor is free"))
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        match rustix::net::send(&self.0, frame, SendFlags::DONTWAIT) {
            Ok(_) => true,
            Err(Errno::AGAIN | Errno::NOBUFS) => false,
            Err(errno) => panic!("the wire: {errno}"),
        }
    }

    /// Sends a frame; waits for room.
    fn send(&self, frame: &[u8]) {
        polled("room on the wire", || self.try_send(frame).then_some(()));
    }

    fn receive(&self, limit: Duration) -> Option<Vec<u8>> {
        let deadline = Instant::now() + limit;
        let mut frame = vec![0; FRAME_MAX];
        loop {
            match rustix::net::recv(&self.0, &mut frame[..], RecvFlags::DONTWAIT) {
                Ok((len, _)) => {
                    frame.truncate(len);
                    return Some(frame);
                }
                Err(Errno::AGAIN) if readable(&self.0, deadline.saturating_duration_since(Instant::now())) => {}
                Err(Errno::AGAIN) => return None,
                Err(errno) => panic!("the wire: {errno}"),
            }
        }
    }
}

/// Returns whether an interface is up, by its line of ip(8).
fn is_up(shown: &Output) -> bool {
    String::from_utf8_lossy(&shown.stdout).contains(" state UP ")
}

/// QEMU's model with two pairs of queues, with event indices or without.
struct Pairs<const EVENT_IDX: bool, const STEERS: bool = true> {
    // Dropped first, so that the machine ends before its wire.
    machine: Machine,
    kernel: Kernel,
    _place: Place,
}

impl<const EVENT_IDX: bool, const STEERS: bool> Pairs<EVENT_IDX, STEERS> {
    /// Makes a fresh device, which can be made to see any of these memories.
    fn with(memories: &[&NicMemory]) -> Option<Self> {
        if !is_possible() {
            return None;
        }
        if !std::path::Path::new("/dev/net/tun").exists() {
            println!("skipped: needs /dev/net/tun");
            return None;
        }
        let place = Place::new("pairs");
        let kernel = Kernel::new(&place);
        let properties =
            format!("mac={},disable-legacy=on,host_mtu=9000,mq=on,rss=on,event_idx={EVENT_IDX}", Self::MAC);
        let regions: Vec<_> = memories.iter().flat_map(|memory| regions(memory)).collect();
        let machine = Machine::start_on_tap(&place.0, QUEUES, "virtio-net-pci", &properties, &regions)?;
        // The kernel drops all frames, and says that it sent them, until it has heard that the TAP has a reader. `ip` waits
        // for the lock under which it hears that.
        polled("the TAP to be up", || place.command("ip").args(["link", "show", "nic0"]).output().ok().filter(is_up));
        Some(Pairs { machine, kernel, _place: place })
    }
}

impl<const EVENT_IDX: bool, const STEERS: bool> World for Pairs<EVENT_IDX, STEERS> {
    type Nic = VirtioNet<QtestBus>;
    type Bus = QtestBus;

    const MEMORY_AT: Iova = MEMORY_AT;
    const QUEUES: u8 = 1;
    const MTU_MAX: u16 = 9000;
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    // Frames that the device does not take stay in the TAP's queue.
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(memory: &NicMemory) -> Option<Self> {
        Self::with(&[memory])
    }

    fn bus(&self) -> QtestBus {
        self.machine.bus()
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        self.kernel.try_send(frame)
    }

    fn sender(&self) -> Sender {
        let kernel = self.kernel.try_clone();
        Box::new(move |frame| kernel.send(frame))
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.kernel.receive(limit)
    }

    fn set_link(&mut self, up: bool) {
        self.machine.set_link(up);
    }

    fn pull(&mut self) {
        self.machine.end();
    }
}

impl<const EVENT_IDX: bool, const STEERS: bool> Twinned for Pairs<EVENT_IDX, STEERS> {
    fn twin(bus: &QtestBus) -> QtestBus {
        bus.clone()
    }
}

impl<const EVENT_IDX: bool, const STEERS: bool> Repointed for Pairs<EVENT_IDX, STEERS> {
    const HOW: How = if STEERS { How::Steer } else { How::Point };
    // The kernel delivers a flow through the TAP queue from which its last frame came, and does not wait until the
    // earlier queue is empty (tun_flow_update in its drivers/net/tun.c). For the kernel, all our frames but those of
    // IP are one flow.
    const IN_ORDER: bool = false;

    fn with_two(first: &NicMemory, second: &NicMemory) -> Option<Self> {
        Self::with(&[first, second])
    }
}

suite!(pairs, super::Pairs<true>);
suite_in_place!(pairs_in_place, super::Pairs<true>);
suite_repoint!(pairs_steered, super::Pairs<true>);
suite_repoint!(flags_steered, super::Pairs<false>);
suite_repoint!(pairs_pointed, super::Pairs<true, false>);
