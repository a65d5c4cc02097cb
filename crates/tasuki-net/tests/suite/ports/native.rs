//! A native program: it is a node by itself, with the library.

use std::time::Duration;

use tasuki_net::port::Armed;
use tasuki_net::switch::{Switch, To};
use tasuki_net::vni::{SendError, Vni};

use super::{End, Lost, Rest};
use crate::wait::readable;

pub struct Native {
    vni: Vni,
    switch: Switch,
    came: Vec<Vec<u8>>,
    lost: Lost,
}

impl Native {
    pub fn new(vni: Vni, switch: Switch) -> Self {
        Native { vni, switch, came: Vec::new(), lost: Lost::default() }
    }
}

impl End for Native {
    fn send(&mut self, frame: &[u8]) -> bool {
        let Some(to) = frame.first_chunk() else { return false };
        let sent = match self.switch.find(*to) {
            To::Node(node) => self.vni.send(node, frame),
            To::Nobody => {
                self.lost.nobody += 1;
                return true;
            }
            several => {
                let nodes = self.switch.nodes_of(several);
                match self.vni.send_to_all(nodes.iter(), frame.len(), false, |room| room.copy_from_slice(frame)) {
                    Err(SendError::NoRoom(_)) => {
                        self.lost.no_room += 1;
                        return true;
                    }
                    sent => sent.map(|_| ()),
                }
            }
        };
        match sent {
            Ok(()) => {}
            Err(SendError::NoRoom(_)) => self.lost.no_room += 1,
            Err(SendError::Length { .. }) => self.lost.length += 1,
            Err(other) => panic!("{other}"),
        }
        sent.is_ok()
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.came)
    }

    fn turn(&mut self) -> usize {
        let Self { vni, switch, came, lost } = self;
        vni.flush();
        vni.wake();
        vni.receive(|incoming| {
            if switch.admits(&incoming).is_none() {
                return incoming.refuse(&mut lost.forged, &mut 0);
            }
            let mut frame = vec![0; incoming.len()];
            incoming.copy_to(&mut frame).expect("nothing was taken back");
            came.push(frame);
        })
    }

    fn arm(&mut self) -> Armed {
        self.vni.arm()
    }

    fn is_woken(&self, within: Duration) -> bool {
        readable(&self.vni.fd(), within)
    }

    fn lost(&self) -> Lost {
        self.lost
    }

    fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    fn end(mut self: Box<Self>, told: bool) -> Box<dyn Rest> {
        // Frames that a killed program had posted and not flushed are lost, so it flushes at each turn.
        if told {
            self.vni.flush();
        }
        Box::new(Program(self.came))
    }
}

/// Frames that it has read.
struct Program(Vec<Vec<u8>>);

impl Rest for Program {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        Box::new(Native { came: self.0, ..Native::new(vni, switch) })
    }
}
