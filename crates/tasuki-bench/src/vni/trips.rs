//! Round trips of one frame between two nodes that spin, or that both sleep in between.

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tasuki_net::port::Armed;
use tasuki_net::vni::Vni;

use super::nodes::join;
use super::pair::{Buffer, SINK, SOURCE};
use crate::orders::Orders;
use crate::sample::Sample;

/// Sends every received frame back.
pub fn answer<const LEN: usize, const ASLEEP: bool>(mut orders: Orders) -> Result<()> {
    let mut vni = join(orders.fds(), SINK, [SOURCE])?;
    let mut buffer = Buffer::new(LEN);
    for _ in 0..orders.total() {
        one::<ASLEEP>(&mut vni, buffer.bytes())?;
        vni.send(SOURCE, buffer.bytes())?;
        vni.flush();
    }
    Ok(())
}

pub fn trips<const LEN: usize, const ASLEEP: bool>(mut orders: Orders) -> Result<Sample> {
    let mut vni = join(orders.fds(), SOURCE, [SINK])?;
    let (mut sent, mut came) = (Buffer::new(LEN), Buffer::new(LEN));
    Sample::of_calls(&orders, |number| {
        let byte = number.to_ne_bytes()[0];
        sent.bytes().fill(byte);
        vni.send(SINK, sent.bytes())?;
        vni.flush();
        one::<ASLEEP>(&mut vni, came.bytes())?;
        ensure!(came.bytes()[LEN - 1] == byte, "frame {number} did not come back as it was sent");
        Ok(())
    })
}

/// Waits for a frame, and copies it out.
#[inline]
fn one<const ASLEEP: bool>(vni: &mut Vni, into: &mut [u8]) -> Result<()> {
    let mut whole = true;
    while vni.receive(|frame| whole = frame.copy_to(into) == Ok(into.len())) == 0 {
        if ASLEEP && vni.arm() == Armed::Idle {
            match rustix::event::poll(&mut [PollFd::from_borrowed_fd(vni.fd(), PollFlags::IN)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("the kernel refused to wait"),
            }
            vni.wake();
        }
    }
    ensure!(whole, "a frame was taken back or cut");
    Ok(())
}
