//! A bus to a card that is a value in this process, which decides what the card answers.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::event::EventfdFlags;
use tasuki_net::nic::bus::{Bus, BusError, IntX, Iova, Part, Registers};

/// A card's answers. Its registers are the same behind every BAR; a narrow read returns the low bits of the answer.
pub trait Answers {
    /// Returns the word at `offset` of the configuration space.
    fn config(&self, offset: u16) -> u32;
    /// Returns the register at `offset`.
    fn read(&self, offset: u32) -> u32;
    /// Writes the register at `offset`.
    fn write(&self, offset: u32, value: u32);
    /// Returns whether the card's accesses to memory go through an IOMMU.
    fn is_behind_an_iommu(&self) -> bool {
        false
    }
    /// Learns that the driver did something else to the card than to read or write a register.
    fn touch(&self) {}
    /// Lets the card reach memory.
    fn map(&self, _at: Iova, _len: usize) -> Result<(), BusError> {
        Ok(())
    }
    /// Takes memory away from the card.
    fn unmap(&self, _at: Iova, _len: usize) -> Result<(), BusError> {
        Ok(())
    }
}

/// The bus to such a card, and its registers.
#[derive(Debug)]
pub struct Stub<C>(pub Rc<C>);

impl<C> Clone for Stub<C> {
    fn clone(&self) -> Self {
        Stub(Rc::clone(&self.0))
    }
}

impl<C: Answers> Bus for Stub<C> {
    type Registers = Stub<C>;

    fn read_config(&mut self, offset: u16) -> Result<u32, BusError> {
        assert!(offset.is_multiple_of(4), "a word of the configuration space at {offset:#x}");
        Ok(self.0.config(offset))
    }

    fn write_config(&mut self, _: u16, _: u32) -> Result<(), BusError> {
        self.0.touch();
        Ok(())
    }

    fn registers(&mut self, _: u8) -> Result<Stub<C>, BusError> {
        Ok(self.clone())
    }

    fn translates(&self) -> bool {
        self.0.is_behind_an_iommu()
    }

    fn map_part(&mut self, Part { len, at, .. }: Part<'_>) -> Result<(), BusError> {
        self.0.map(at, len)
    }

    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError> {
        self.0.unmap(at, len)
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError> {
        self.0.touch();
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        Ok((0..count).map(|_| eventfd()).collect())
    }

    fn intx(&mut self) -> Result<IntX, BusError> {
        self.0.touch();
        Ok(IntX::create().expect("two eventfds"))
    }

    fn reset(&mut self) -> Result<(), BusError> {
        Ok(())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are what was asked for")]
impl<C: Answers> Registers for Stub<C> {
    fn read8(&self, offset: u32) -> u8 {
        self.0.read(offset) as u8
    }

    fn read16(&self, offset: u32) -> u16 {
        assert!(offset.is_multiple_of(2), "16 bits at {offset:#x}");
        self.0.read(offset) as u16
    }

    fn read32(&self, offset: u32) -> u32 {
        assert!(offset.is_multiple_of(4), "32 bits at {offset:#x}");
        self.0.read(offset)
    }

    fn write8(&self, offset: u32, value: u8) {
        self.0.write(offset, value.into());
    }

    fn write16(&self, offset: u32, value: u16) {
        assert!(offset.is_multiple_of(2), "16 bits at {offset:#x}");
        self.0.write(offset, value.into());
    }

    fn write32(&self, offset: u32, value: u32) {
        assert!(offset.is_multiple_of(4), "32 bits at {offset:#x}");
        self.0.write(offset, value);
    }
}
