// A QUIC server or client by quic-go, for tests of the front door.
//
//	peer serve CERT KEY      serves on a port of 127.0.0.1, prints its address, and echoes every stream
//	peer ask ADDRESS NAME CA connects, sends each line of stdin in a stream of its own, and prints the answers
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/quic-go/quic-go"
)

var protocols = []string{"echo"}

// tagged makes connection ids that begin with a hash of the server's address, so that the front door finds the server.
type tagged struct{ tag [4]byte }

func (t tagged) GenerateConnectionID() (quic.ConnectionID, error) {
	id := make([]byte, 8)
	copy(id, t.tag[:])
	_, err := rand.Read(id[5:])
	return quic.ConnectionIDFromBytes(id), err
}

func (tagged) ConnectionIDLen() int { return 8 }

func tagOf(address *net.UDPAddr) (tag [4]byte) {
	input := append([]byte("culvert"), address.IP.To4()...)
	input = binary.BigEndian.AppendUint16(input, uint16(address.Port))
	sum := sha256.Sum256(input)
	copy(tag[:], sum[:])
	return tag
}

func serve(cert, key string) error {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return err
	}
	socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return err
	}
	ids := tagged{tagOf(socket.LocalAddr().(*net.UDPAddr))}
	transport := &quic.Transport{Conn: socket, ConnectionIDGenerator: ids}
	config := &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: protocols}
	listener, err := transport.Listen(config, nil)
	if err != nil {
		return err
	}
	fmt.Println(socket.LocalAddr())
	for {
		connection, err := listener.Accept(context.Background())
		if err != nil {
			return err
		}
		go func() {
			for {
				stream, err := connection.AcceptStream(context.Background())
				if err != nil {
					return
				}
				go func() {
					io.Copy(stream, stream)
					stream.Close()
				}()
			}
		}()
	}
}

func ask(address, name, ca string) error {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return errors.New("no certificate in " + ca)
	}
	config := &tls.Config{RootCAs: roots, ServerName: name, NextProtos: protocols}
	connection, err := quic.DialAddr(context.Background(), address, config, nil)
	if err != nil {
		return err
	}
	defer connection.CloseWithError(0, "")
	fmt.Println("connected")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		stream, err := connection.OpenStreamSync(context.Background())
		if err != nil {
			return err
		}
		if _, err := stream.Write(lines.Bytes()); err != nil {
			return err
		}
		stream.Close()
		answer, err := io.ReadAll(stream)
		if err != nil {
			return err
		}
		fmt.Printf("answer %s\n", answer)
	}
	return lines.Err()
}

func main() {
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 3 && args[0] == "serve":
		err = serve(args[1], args[2])
	case len(args) == 4 && args[0] == "ask":
		err = ask(args[1], args[2], args[3])
	default:
		err = errors.New("usage: peer serve CERT KEY | peer ask ADDRESS NAME CA")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
