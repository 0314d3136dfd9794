package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
)

// chunk is the size of reads and writes of bulk data. It is a multiple of the
// stream's period, so that every chunk starts where the period starts.
const chunk = 64 << 10

// period is the length after which the deterministic stream repeats:
// i>>8 counts up to 256 before it wraps in a byte.
const period = 256 * 256

var pattern = func() []byte {
	b := make([]byte, period)
	for i := range b {
		b[i] = byte(i*31 + (i >> 8))
	}
	return b
}()

// writeStream writes the first n bytes of the deterministic stream, in which
// byte i (from 0) is ((i*31) + (i>>8)) & 0xff, with at most size bytes a write.
func writeStream(w io.Writer, n int64, size int) error {
	for at := int64(0); at < n; {
		start := int(at % period)
		part := pattern[start:min(start+size, period)]
		if left := n - at; int64(len(part)) > left {
			part = part[:left]
		}
		if _, err := w.Write(part); err != nil {
			return fmt.Errorf("write failed after %d of %d bytes: %w", at, n, err)
		}
		at += int64(len(part))
	}
	return nil
}

// streamSum is the hex SHA-256 of the first n bytes of the stream.
func streamSum(n int64) string {
	h := sha256.New()
	_ = writeStream(h, n, chunk) // a hash never fails to write
	return hex.EncodeToString(h.Sum(nil))
}

// readAllSum reads to the end of r and returns the number of bytes and their
// hex SHA-256.
func readAllSum(r io.Reader) (int64, string, error) {
	h := sha256.New()
	// A plain loop: io.Copy would hide the size of the reads.
	buf := make([]byte, chunk)
	var total int64
	for {
		n, err := r.Read(buf)
		h.Write(buf[:n])
		total += int64(n)
		if errors.Is(err, io.EOF) {
			return total, hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return total, "", err
		}
	}
}

// roundTrip sends out and reads as many bytes back into in. Beyond what
// socket buffers hold for sure, it sends and reads at the same time.
func roundTrip(c net.Conn, out, in []byte) error {
	sent := make(chan error, 1)
	send := func() {
		_, err := c.Write(out)
		sent <- err
	}
	if len(out) <= 16<<10 {
		send()
	} else {
		go send()
	}
	if _, err := io.ReadFull(c, in); err != nil {
		return fmt.Errorf("reading the echo: %w", err)
	}
	if err := <-sent; err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	if string(out) != string(in) {
		return errors.New("echo differs from what was sent")
	}
	return nil
}
